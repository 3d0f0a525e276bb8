"""Norms in NumPy with one mistake each, for the check of functions."""

from __future__ import annotations

import numpy as np

import cupynorm
from cupynorm.dtypes import decode, encode

SHAPE = (16, 96)


def mean_of(values):
    return values.mean(1, keepdims=True)


def x_hat(x, eps):
    centered = x - mean_of(x)
    return centered / np.sqrt(mean_of(centered**2) + eps)


def layer_norm(x, w, b, eps):
    return x_hat(x, eps) * w + b


def by_std(x, w, b, std):
    return (x - mean_of(x)) / std * w + b


def std_of(x, ddof=0):
    return x.std(1, keepdims=True, ddof=ddof)


def rounded(values, dtype):
    return decode(encode(values.astype(np.float64), dtype), dtype).astype(values.dtype)


def without_last_columns(y):
    return np.concatenate([y[:, :-3], 0 * y[:, :3]], axis=1)


def dx_of(wdy, h, rstd):
    return rstd * (wdy - mean_of(wdy) - h * mean_of(wdy * h))


def dweight_of(dy, h):
    return (dy * h).sum(0)


def sum_in_half(terms):
    total = np.zeros(terms.shape[1], np.float16)
    for row in terms.astype(np.float16):
        total = total + row
    return total.astype(np.float32)


def forward_of(change):
    def forward(x, weight, bias, eps):
        compute = "float64" if x.dtype == np.float64 else "float32"
        with np.errstate(all="ignore"):
            return change(*(each.astype(compute) for each in (x, weight, bias)), eps).astype(
                x.dtype
            )

    return forward


def backward_of(tensor, change):
    def backward(dy, x, mean, rstd, weight):
        dtype = x.dtype
        dy, x, weight = (each.astype(mean.dtype) for each in (dy, x, weight))
        h = (x - mean[:, None]) * rstd[:, None]
        made = {
            "dx": dx_of(dy * weight, h, rstd[:, None]),
            "dweight": dweight_of(dy, h),
            "dbias": dy.sum(0),
        }
        if change is not None:
            made[tensor] = change(dy, x, h, weight, rstd[:, None])
        return tuple(each.astype(dtype) for each in made.values())

    return backward


def diagnoses(forward=None, backward=None, **options) -> list[str]:
    options = {"shapes": [SHAPE], "library": "numpy"} | options
    return cupynorm.check_function((forward, backward), **options).diagnoses
