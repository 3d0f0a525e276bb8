// factor.cuh -- by what packs.cu multiplies
constexpr float factor = 2.0f;
