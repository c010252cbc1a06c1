/* CRC-32 of zlib: polynomial 0xEDB88320 reflected, initial value and final xor all ones. */
#include "pdkv.h"

#include <string.h>

#ifdef HAVE_X86
#include <immintrin.h>
#endif

/* tables[k][b]: the register after byte b and k zero bytes. Filled before the library's load returns. */
static uint32_t tables[8][256];

__attribute__((constructor)) static void fill_tables(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
        tables[0][byte] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (uint32_t byte = 0; byte < 256; byte++)
            tables[k][byte] = tables[k - 1][byte] >> 8 ^ tables[0][tables[k - 1][byte] & 0xff];
}

/* Eight bytes at a time by tables. `crc` is the bare register, without the final xor. */
static uint32_t crc32_tables(uint32_t crc, const uint8_t *data, size_t size)
{
    for (; size >= 8; data += 8, size -= 8) {
        uint64_t next;
        memcpy(&next, data, 8);
        next ^= crc;
        crc = tables[7][next & 0xff] ^ tables[6][next >> 8 & 0xff] ^ tables[5][next >> 16 & 0xff] ^
              tables[4][next >> 24 & 0xff] ^ tables[3][next >> 32 & 0xff] ^ tables[2][next >> 40 & 0xff] ^
              tables[1][next >> 48 & 0xff] ^ tables[0][next >> 56];
    }
    for (; size; data++, size--)
        crc = crc >> 8 ^ tables[0][(crc ^ *data) & 0xff];
    return crc;
}

#ifdef HAVE_X86
TARGET_AVX2 INLINE __m128i load(const uint8_t *data) { return _mm_loadu_si128((const __m128i *)data); }

/* The 16 bytes that, put before `next`, leave the same register as `lane` and then the bytes between would.
 * `distance` holds x^(8 d + 32) and x^(8 d - 32) modulo the polynomial, reflected, for a distance of d bytes. */
TARGET_AVX2 INLINE __m128i fold(__m128i lane, __m128i distance, __m128i next)
{
    return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(lane, distance, 0x00),
                                       _mm_clmulepi64_si128(lane, distance, 0x11)),
                         next);
}

/* Carry-less multiplication: four lanes of 16 bytes run 64 bytes ahead of themselves, then become one. */
TARGET_AVX2 static uint32_t crc32_clmul(uint32_t crc, const uint8_t *data, size_t size)
{
    const __m128i by_64 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4);
    const __m128i by_16 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    uint8_t last[16];

    if (size < 64)
        return crc32_tables(crc, data, size);
    __m128i a = _mm_xor_si128(load(data), _mm_cvtsi32_si128((int)crc));
    __m128i b = load(data + 16), c = load(data + 32), d = load(data + 48);
    for (data += 64, size -= 64; size >= 64; data += 64, size -= 64) {
        a = fold(a, by_64, load(data));
        b = fold(b, by_64, load(data + 16));
        c = fold(c, by_64, load(data + 32));
        d = fold(d, by_64, load(data + 48));
    }
    a = fold(fold(fold(a, by_16, b), by_16, c), by_16, d);
    for (; size >= 16; data += 16, size -= 16)
        a = fold(a, by_16, load(data));
    _mm_storeu_si128((__m128i *)last, a);
    return crc32_tables(crc32_tables(0, last, 16), data, size);
}
#endif

/* zlib's crc32(value, data, size). */
EXPORT uint32_t pdkv_crc32(int level, uint32_t value, const uint8_t *data, size_t size)
{
#ifdef HAVE_X86
    if (level >= LEVEL_AVX2)
        return ~crc32_clmul(~value, data, size);
#endif
    (void)level;
    return ~crc32_tables(~value, data, size);
}
