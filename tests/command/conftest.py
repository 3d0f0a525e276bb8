"""Refusals of python -m cupynorm."""

import pytest

from cupynorm import __main__ as command


@pytest.fixture
def refused(capsys):
    """Runs a command that is refused, in this process, and returns the last line on stderr."""

    def refused(*arguments):
        try:
            code = command.main([str(each) for each in arguments])
        except SystemExit as end:  # of argparse
            code = end.code
        assert code == 2
        return capsys.readouterr().err.strip().splitlines()[-1]

    return refused
