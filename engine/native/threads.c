/* Threads: those of the OpenMP runtime that torch computes with. A second pool would fight with it for the cores. */
#include "pdmm.h"

static void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*thread_number)(void);
static int (*thread_count)(void);

/* Whether this CPU has what the kernels need. */
EXPORT int pdmm_supported(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
    return 0;
#endif
}

/* Use these functions of a runtime: GOMP_parallel, omp_get_thread_num, omp_get_num_threads. Without: one thread. */
EXPORT void pdmm_threads(void *gomp_parallel, void *get_thread_num, void *get_num_threads)
{
    parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))gomp_parallel;
    thread_number = (int (*)(void))get_thread_num;
    thread_count = (int (*)(void))get_num_threads;
}

void in_parallel(void (*work)(void *), void *data, unsigned threads)
{
    if (threads > 1 && parallel)
        parallel(work, data, threads, 0);
    else
        work(data);
}

struct share my_share(size_t count)
{
    size_t threads = parallel ? (size_t)thread_count() : 1, number = parallel ? (size_t)thread_number() : 0;
    return (struct share){count * number / threads, count * (number + 1) / threads};
}
