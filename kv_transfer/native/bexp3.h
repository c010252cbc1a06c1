/* The codec bexp3: bfloat16 exponents as 3-bit distances from their channel's largest, in bit planes.
 *
 *   section   [layer, token, channel], bfloat16, `count` elements
 *   tile      up to `group` tokens of one layer, [tokens, channels]; each channel has one maximum per tile
 *   code      maximum - exponent, or 7 (the escape) if that is more than 6
 *
 *   payload = | u32 escapes of each tile | maxima, [tile, channel] | low plane, `count` bytes
 *             | plane 0 | plane 1 | plane 2, (count + 7) / 8 bytes each | exponents of escaped elements, in order |
 *
 * Bit i % 8 of byte i / 8 of plane p is bit p of the code of element i. If `channels` is a multiple of 8, as in every
 * model, each row (the channels of one token) starts at a byte of the planes and is handled in blocks of 64 elements
 * (bexp3_tiles.c); else the section is handled bit by bit (bexp3.c).
 */
#ifndef PDKV_BEXP3_H
#define PDKV_BEXP3_H

#include "pdkv.h"

#define ESCAPE 7
#define LIKELY_ESCAPES 4 /* of 64 elements; most have no more */

/* The parts of a payload that belong to a tile; a decoder only reads them. */
struct tile {
    uint8_t *maxima;    /* [channels] */
    uint8_t *low;       /* [tokens, channels] */
    uint8_t *planes[3]; /* [tokens, channels / 8] each; if `channels` is no multiple of 8, from the first bit on */
};

/* For `channels` that are a multiple of 8. */
struct tile_functions {
    /* Fill `maxima` [channels] with the largest exponent of each channel. */
    void (*find_maxima)(const word_t *values, size_t tokens, size_t channels, uint8_t *maxima);
    /* Fill low plane and bit planes. Returns the end of the escapes, with room for LIKELY_ESCAPES more behind it. */
    uint8_t *(*encode_tile)(const word_t *values, size_t tokens, size_t channels, struct tile tile, uint8_t *escapes);
    /* Fill `values`. Returns the end of the escapes that were used, or NULL if there are too few before `end`. */
    const uint8_t *(*decode_tile)(struct tile tile, size_t tokens, size_t channels, const uint8_t *escapes,
                                  const uint8_t *end, word_t *values);
};

const struct tile_functions *tile_functions(int level);

#endif
