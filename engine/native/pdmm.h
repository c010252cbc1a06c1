/* What the files of this library share: the instructions they use, and the threads they run on. */
#ifndef PDMM_H
#define PDMM_H

#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

#if defined(__x86_64__)
#include <immintrin.h>
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define INLINE TARGET static inline __attribute__((always_inline))
#endif

/* Run `work` on so many threads at once, this one among them. */
void in_parallel(void (*work)(void *), void *data, unsigned threads);

/* Part [begin, end) of `count` pieces of work that belongs to the thread that asks, within `in_parallel`. */
struct share {
    size_t begin, end;
};
struct share my_share(size_t count);

#endif
