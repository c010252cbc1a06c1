/* 16-bit floats to two planes of bytes and back, for the codec bexp-zstd.
 *
 * One loop for all levels: the compiler makes vectors of it, as wide as the level's target allows.
 */
#include "pdkv.h"

INLINE void split(const word_t *restrict values, size_t count, uint8_t *restrict high, uint8_t *restrict low)
{
    for (size_t i = 0; i < count; i++) {
        high[i] = word_high(values[i]);
        low[i] = word_low(values[i]);
    }
}

INLINE void join(const uint8_t *restrict high, const uint8_t *restrict low, size_t count, word_t *restrict values)
{
    for (size_t i = 0; i < count; i++)
        values[i] = word_join(high[i], low[i]);
}

#ifdef HAVE_X86
TARGET_AVX2 static void split_avx2(const word_t *values, size_t count, uint8_t *high, uint8_t *low)
{
    split(values, count, high, low);
}
TARGET_AVX512 static void split_avx512(const word_t *values, size_t count, uint8_t *high, uint8_t *low)
{
    split(values, count, high, low);
}
TARGET_AVX2 static void join_avx2(const uint8_t *high, const uint8_t *low, size_t count, word_t *values)
{
    join(high, low, count, values);
}
TARGET_AVX512 static void join_avx512(const uint8_t *high, const uint8_t *low, size_t count, word_t *values)
{
    join(high, low, count, values);
}
#endif

/* values: 2 * count bytes; high, low: count bytes each. */
EXPORT void pdkv_split(int level, const uint8_t *values, size_t count, uint8_t *high, uint8_t *low)
{
    const word_t *words = (const word_t *)values;
#ifdef HAVE_X86
    if (level == LEVEL_AVX512) {
        split_avx512(words, count, high, low);
        return;
    }
    if (level == LEVEL_AVX2) {
        split_avx2(words, count, high, low);
        return;
    }
#endif
    (void)level;
    split(words, count, high, low);
}

/* The inverse of `pdkv_split`. */
EXPORT void pdkv_join(int level, const uint8_t *high, const uint8_t *low, size_t count, uint8_t *values)
{
    word_t *words = (word_t *)values;
#ifdef HAVE_X86
    if (level == LEVEL_AVX512) {
        join_avx512(high, low, count, words);
        return;
    }
    if (level == LEVEL_AVX2) {
        join_avx2(high, low, count, words);
        return;
    }
#endif
    (void)level;
    join(high, low, count, words);
}
