/* The hot loops of KV transfer on CPUs, in plain C without dependencies.
 *
 * Every function that is exported takes the dispatch level to run at, one of those that `pdkv_levels` reports, and
 * gives the same bytes at each. None keeps state, so all may be called from any number of threads. Buffers need no
 * alignment, must not overlap, and are as large as stated: the caller checks that. Hosts are little endian.
 */
#ifndef PDKV_H
#define PDKV_H

#include <stddef.h>
#include <stdint.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "pdkv needs a little-endian host"
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

#if defined(__x86_64__)
#define HAVE_X86 1
/* What each level may use; `pdkv_levels` asks the CPU for exactly these. */
#define TARGET_AVX2 __attribute__((target("avx2,bmi,popcnt,pclmul")))
#define TARGET_AVX512 __attribute__((target("avx2,bmi,popcnt,pclmul,avx512f,avx512bw,avx512vl")))
#endif

enum { LEVEL_PORTABLE = 0, LEVEL_AVX2 = 1, LEVEL_AVX512 = 2 };

/* A 16-bit float somewhere in a byte buffer. */
typedef uint16_t __attribute__((aligned(1), may_alias)) word_t;

/* The two bytes of a 16-bit float that travel apart: `high` is bits 14..7, `low` is bit 15 and bits 6..0. */
INLINE uint8_t word_high(uint16_t word) { return (uint8_t)(word >> 7); }
INLINE uint8_t word_low(uint16_t word) { return (uint8_t)((word >> 8 & 0x80) | (word & 0x7f)); }
INLINE uint16_t word_join(uint8_t high, uint8_t low)
{
    return (uint16_t)((low & 0x80) << 8 | high << 7 | (low & 0x7f));
}

#endif
