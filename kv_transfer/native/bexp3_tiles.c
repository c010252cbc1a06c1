/* Tiles of the codec bexp3 at every dispatch level. Levels differ in how they handle a block of 64 channels. */
#include "bexp3.h"

#include <string.h>

#ifdef HAVE_X86
#include <immintrin.h>
#endif

#define BLOCK 64

/* A block's bits of each plane: bit i is that of element i. */
struct planes {
    uint64_t p0, p1, p2;
};

/* --- escapes of a block ---------------------------------------------------------------------------------------
 *
 * One element in fifty escapes, so whether a block has none, one or two cannot be predicted. The first few are
 * handled without a branch, whether they are there or not. */

/* Append the exponents of escaped elements. Writes up to LIKELY_ESCAPES bytes behind the end that it returns. */
INLINE uint8_t *take_escapes(struct planes bits, const word_t *values, uint8_t *escapes)
{
    uint64_t escaped = bits.p0 & bits.p1 & bits.p2;
    uint8_t *end = escapes + __builtin_popcountll(escaped);

    for (int i = 0; i < LIKELY_ESCAPES; i++, escaped &= escaped - 1)
        *escapes++ = word_high(values[__builtin_ctzll(escaped | 1ull << 63)]);
    for (; escaped; escaped &= escaped - 1)
        *escapes++ = word_high(values[__builtin_ctzll(escaped)]);
    return end;
}

/* Put exponents where elements escaped. Returns the end of those used, or NULL if there are too few before `end`. */
INLINE const uint8_t *put_escapes(struct planes bits, const uint8_t *low, const uint8_t *escapes,
                                  const uint8_t *end, word_t *values)
{
    uint64_t escaped = bits.p0 & bits.p1 & bits.p2;
    const int count = __builtin_popcountll(escaped);
    word_t nowhere;

    if (count > end - escapes)
        return NULL;
    if (end - escapes >= LIKELY_ESCAPES)
        for (int i = 0; i < LIKELY_ESCAPES; i++, escaped &= escaped - 1) {
            const int at = __builtin_ctzll(escaped | 1ull << 63);
            word_t *value = escaped ? values + at : &nowhere;
            *value = word_join(escapes[i], low[at]);
        }
    for (const uint8_t *next = escapes + count - __builtin_popcountll(escaped); escaped; escaped &= escaped - 1) {
        const int at = __builtin_ctzll(escaped);
        values[at] = word_join(*next++, low[at]);
    }
    return escapes + count;
}

/* --- blocks ---------------------------------------------------------------------------------------------------
 *
 * encode_block: of `values` [64] and `maxima` [64], fills `low` [64] and returns the codes.
 * decode_block: the inverse, except that where elements escape, `values` hold anything. */

/* Bit 0 of each of eight bytes as one byte, and back: byte i <-> bit i. */
INLINE uint64_t gather_bits(uint64_t bytes) { return (bytes & 0x0101010101010101) * 0x0102040810204080 >> 56; }
INLINE uint64_t spread_bits(uint64_t bits)
{
    const uint64_t own = (bits & 0xff) * 0x0101010101010101 & 0x8040201008040201;
    return (own | ((own & 0x7f7f7f7f7f7f7f7f) + 0x7f7f7f7f7f7f7f7f)) >> 7 & 0x0101010101010101;
}

static struct planes encode_block_portable(const word_t *restrict values, const uint8_t *restrict maxima,
                                           uint8_t *restrict low)
{
    uint8_t codes[BLOCK];
    struct planes bits = {0, 0, 0};

    for (int i = 0; i < BLOCK; i++) {
        const uint8_t distance = maxima[i] - word_high(values[i]);
        codes[i] = distance < ESCAPE ? distance : ESCAPE;
        low[i] = word_low(values[i]);
    }
    for (int i = 0; i < BLOCK; i += 8) {
        uint64_t eight;
        memcpy(&eight, codes + i, 8);
        bits.p0 |= gather_bits(eight) << i;
        bits.p1 |= gather_bits(eight >> 1) << i;
        bits.p2 |= gather_bits(eight >> 2) << i;
    }
    return bits;
}

static void decode_block_portable(struct planes bits, const uint8_t *restrict maxima, const uint8_t *restrict low,
                                  word_t *restrict values)
{
    uint8_t codes[BLOCK];

    for (int i = 0; i < BLOCK; i += 8) {
        const uint64_t eight =
            spread_bits(bits.p0 >> i) | spread_bits(bits.p1 >> i) << 1 | spread_bits(bits.p2 >> i) << 2;
        memcpy(codes + i, &eight, 8);
    }
    for (int i = 0; i < BLOCK; i++)
        values[i] = word_join((uint8_t)(maxima[i] - codes[i]), low[i]);
}

#define LEVEL(name) name##_portable
#define TARGET
#include "bexp3_level.h"

#ifdef HAVE_X86
#define LOAD(address) _mm256_loadu_si256((const __m256i *)(address))
#define STORE(address, value) _mm256_storeu_si256((__m256i *)(address), value)

/* The low bytes of 16 + 16 words below 256, in order. */
TARGET_AVX2 INLINE __m256i narrow(__m256i first, __m256i second)
{
    return _mm256_permute4x64_epi64(_mm256_packus_epi16(first, second), 0xd8);
}

TARGET_AVX2 INLINE __m256i words_high(__m256i words)
{
    return _mm256_and_si256(_mm256_srli_epi16(words, 7), _mm256_set1_epi16(0xff));
}

TARGET_AVX2 INLINE __m256i words_low(__m256i words)
{
    return _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(words, 8), _mm256_set1_epi16(0x80)),
                           _mm256_and_si256(words, _mm256_set1_epi16(0x7f)));
}

/* The top bits of 32 bytes. */
TARGET_AVX2 INLINE uint64_t top_bits(__m256i bytes) { return (uint32_t)_mm256_movemask_epi8(bytes); }

TARGET_AVX2 INLINE struct planes encode_block_avx2(const word_t *values, const uint8_t *maxima, uint8_t *low)
{
    struct planes bits = {0, 0, 0};

    for (int i = 0; i < BLOCK; i += 32) {
        const __m256i first = LOAD(values + i), second = LOAD(values + i + 16);
        const __m256i high = narrow(words_high(first), words_high(second));
        const __m256i code = _mm256_min_epu8(_mm256_sub_epi8(LOAD(maxima + i), high), _mm256_set1_epi8(ESCAPE));
        STORE(low + i, narrow(words_low(first), words_low(second)));
        bits.p0 |= top_bits(_mm256_slli_epi16(code, 7)) << i;
        bits.p1 |= top_bits(_mm256_slli_epi16(code, 6)) << i;
        bits.p2 |= top_bits(_mm256_slli_epi16(code, 5)) << i;
    }
    return bits;
}

/* `value` in byte i if bit i of `bits` is set, else 0. */
TARGET_AVX2 INLINE __m256i spread_32(uint32_t bits, char value)
{
    const __m256i byte_of = _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0);
    const __m256i bit_of = _mm256_set1_epi64x((long long)0x8040201008040201);
    const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32((int)bits), byte_of);
    const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit_of), bit_of);
    return _mm256_and_si256(set, _mm256_set1_epi8(value));
}

/* 16 words of their high and low bytes. Sign extension puts the low byte's top bit where the sign belongs. */
TARGET_AVX2 INLINE __m256i join_16(__m128i high, __m128i low)
{
    return _mm256_or_si256(_mm256_slli_epi16(_mm256_cvtepu8_epi16(high), 7),
                           _mm256_and_si256(_mm256_cvtepi8_epi16(low), _mm256_set1_epi16((short)0x807f)));
}

TARGET_AVX2 INLINE void decode_block_avx2(struct planes bits, const uint8_t *maxima, const uint8_t *low,
                                          word_t *values)
{
    for (int i = 0; i < BLOCK; i += 32) {
        const __m256i code = _mm256_or_si256(
            _mm256_or_si256(spread_32((uint32_t)(bits.p0 >> i), 1), spread_32((uint32_t)(bits.p1 >> i), 2)),
            spread_32((uint32_t)(bits.p2 >> i), 4));
        const __m256i high = _mm256_sub_epi8(LOAD(maxima + i), code), lows = LOAD(low + i);
        STORE(values + i, join_16(_mm256_castsi256_si128(high), _mm256_castsi256_si128(lows)));
        STORE(values + i + 16, join_16(_mm256_extracti128_si256(high, 1), _mm256_extracti128_si256(lows, 1)));
    }
}

#define LEVEL(name) name##_avx2
#define TARGET TARGET_AVX2
#include "bexp3_level.h"

/* The low bytes of 32 + 32 words, in order. */
TARGET_AVX512 INLINE __m512i narrow_64(__m512i first, __m512i second)
{
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(first)), _mm512_cvtepi16_epi8(second), 1);
}

/* The low byte of each word is what `word_low` says; the other is anything. */
TARGET_AVX512 INLINE __m512i low_of_words(__m512i words)
{
    return _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(words, 8), _mm512_set1_epi16(0x80)),
                           _mm512_and_si512(words, _mm512_set1_epi16(0x7f)));
}

TARGET_AVX512 INLINE struct planes encode_block_avx512(const word_t *values, const uint8_t *maxima, uint8_t *low)
{
    const __m512i first = _mm512_loadu_si512(values), second = _mm512_loadu_si512(values + 32);
    const __m512i high = narrow_64(_mm512_srli_epi16(first, 7), _mm512_srli_epi16(second, 7));
    const __m512i code = _mm512_min_epu8(_mm512_sub_epi8(_mm512_loadu_si512(maxima), high), _mm512_set1_epi8(ESCAPE));

    _mm512_storeu_si512(low, narrow_64(low_of_words(first), low_of_words(second)));
    return (struct planes){
        _mm512_test_epi8_mask(code, _mm512_set1_epi8(1)),
        _mm512_test_epi8_mask(code, _mm512_set1_epi8(2)),
        _mm512_test_epi8_mask(code, _mm512_set1_epi8(4)),
    };
}

/* As `join_16`. */
TARGET_AVX512 INLINE __m512i join_32(__m256i high, __m256i low)
{
    return _mm512_or_si512(_mm512_slli_epi16(_mm512_cvtepu8_epi16(high), 7),
                           _mm512_and_si512(_mm512_cvtepi8_epi16(low), _mm512_set1_epi16((short)0x807f)));
}

TARGET_AVX512 INLINE void decode_block_avx512(struct planes bits, const uint8_t *maxima, const uint8_t *low,
                                              word_t *values)
{
    const __m512i lows = _mm512_loadu_si512(low);
    __m512i high = _mm512_loadu_si512(maxima);

    high = _mm512_mask_sub_epi8(high, bits.p0, high, _mm512_set1_epi8(1));
    high = _mm512_mask_sub_epi8(high, bits.p1, high, _mm512_set1_epi8(2));
    high = _mm512_mask_sub_epi8(high, bits.p2, high, _mm512_set1_epi8(4));
    _mm512_storeu_si512(values, join_32(_mm512_castsi512_si256(high), _mm512_castsi512_si256(lows)));
    _mm512_storeu_si512(values + 32,
                        join_32(_mm512_extracti64x4_epi64(high, 1), _mm512_extracti64x4_epi64(lows, 1)));
}

#define LEVEL(name) name##_avx512
#define TARGET TARGET_AVX512
#include "bexp3_level.h"
#endif

const struct tile_functions *tile_functions(int level)
{
#ifdef HAVE_X86
    if (level == LEVEL_AVX512)
        return &functions_avx512;
    if (level == LEVEL_AVX2)
        return &functions_avx2;
#endif
    (void)level;
    return &functions_portable;
}
