/* Which dispatch levels this CPU can run. */
#include "pdkv.h"

/* Bit `level` is set if the CPU and the operating system can run that level. */
EXPORT uint32_t pdkv_levels(void)
{
    uint32_t levels = 1u << LEVEL_PORTABLE;
#ifdef HAVE_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("popcnt") &&
        __builtin_cpu_supports("pclmul")) {
        levels |= 1u << LEVEL_AVX2;
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vl"))
            levels |= 1u << LEVEL_AVX512;
    }
#endif
    return levels;
}
