/* Sections of the codec bexp3; the format is in bexp3.h. */
#include "bexp3.h"

#include <string.h>

enum { DECODED = 0, WRONG_LENGTH = 1, WRONG_ESCAPES = 2, WRONG_PADDING = 3 };

/* Sizes and offsets of a payload's parts, in bytes. */
struct layout {
    size_t tiles, count, plane_bytes;
    size_t maxima, low, planes, escapes;
};

static struct layout layout_of(size_t layers, size_t tokens, size_t channels, size_t group)
{
    struct layout at;

    at.tiles = layers * ((tokens + group - 1) / group);
    at.count = layers * tokens * channels;
    at.plane_bytes = (at.count + 7) / 8;
    at.maxima = 4 * at.tiles;
    at.low = at.maxima + at.tiles * channels;
    at.planes = at.low + at.count;
    at.escapes = at.planes + 3 * at.plane_bytes;
    return at;
}

/* Tile number `tile`, whose first element is number `element` of the section. */
static struct tile tile_at(uint8_t *payload, const struct layout *at, size_t channels, size_t tile, size_t element)
{
    uint8_t *planes = payload + at->planes + element / 8;
    return (struct tile){
        .maxima = payload + at->maxima + tile * channels,
        .low = payload + at->low + element,
        .planes = {planes, planes + at->plane_bytes, planes + 2 * at->plane_bytes},
    };
}

/* Tokens of a tile: only the last one of a layer may have fewer than `group`. */
static size_t tile_tokens(size_t tile, size_t tokens, size_t group)
{
    const size_t first = tile % ((tokens + group - 1) / group) * group;
    return tokens - first < group ? tokens - first : group;
}

static uint32_t escape_count(const uint8_t *payload, size_t tile)
{
    uint32_t count;
    memcpy(&count, payload + 4 * tile, 4);
    return count;
}

/* A tile whose channels are no multiple of 8: its first element's bit is bit `shift` of the planes' first bytes. The
 * planes' bits were zero. */
static uint8_t *encode_bitwise(const word_t *values, size_t tokens, size_t channels, struct tile tile, size_t shift,
                               uint8_t *escapes)
{
    for (size_t i = 0; i < tokens * channels; i++) {
        const uint8_t exponent = word_high(values[i]);
        uint8_t code = tile.maxima[i % channels] - exponent;
        if (code >= ESCAPE) {
            code = ESCAPE;
            *escapes++ = exponent;
        }
        for (int p = 0; p < 3; p++)
            tile.planes[p][(shift + i) / 8] |= (uint8_t)((code >> p & 1) << (shift + i) % 8);
        tile.low[i] = word_low(values[i]);
    }
    return escapes;
}

static const uint8_t *decode_bitwise(struct tile tile, size_t tokens, size_t channels, size_t shift,
                                     const uint8_t *escapes, const uint8_t *end, word_t *values)
{
    for (size_t i = 0; i < tokens * channels; i++) {
        int code = 0;
        for (int p = 0; p < 3; p++)
            code |= (tile.planes[p][(shift + i) / 8] >> (shift + i) % 8 & 1) << p;
        if (code == ESCAPE && escapes == end)
            return NULL;
        values[i] = word_join(code == ESCAPE ? *escapes++ : (uint8_t)(tile.maxima[i % channels] - code), tile.low[i]);
    }
    return escapes;
}

/* Write a section's payload and return its size, or 0 if `room` is too small: it must do for an escape of every
 * element and LIKELY_ESCAPES bytes more. */
EXPORT size_t pdkv_bexp3_encode(int level, const uint8_t *values, size_t layers, size_t tokens, size_t channels,
                                size_t group, uint8_t *payload, size_t room)
{
    const struct tile_functions *functions = tile_functions(level);
    const struct layout at = layout_of(layers, tokens, channels, group);
    const word_t *words = (const word_t *)values;
    uint8_t *escapes = payload + at.escapes;
    size_t element = 0;

    if (room < at.escapes + at.count + LIKELY_ESCAPES)
        return 0;
    if (channels % 8)
        memset(payload + at.planes, 0, 3 * at.plane_bytes);
    for (size_t number = 0; number < at.tiles; number++) {
        const struct tile tile = tile_at(payload, &at, channels, number, element);
        const size_t rows = tile_tokens(number, tokens, group);
        const uint8_t *start = escapes;

        functions->find_maxima(words + element, rows, channels, tile.maxima);
        if (channels % 8)
            escapes = encode_bitwise(words + element, rows, channels, tile, element % 8, escapes);
        else
            escapes = functions->encode_tile(words + element, rows, channels, tile, escapes);
        const uint32_t count = (uint32_t)(escapes - start);
        memcpy(payload + 4 * number, &count, 4);
        element += rows * channels;
    }
    return (size_t)(escapes - payload);
}

/* The inverse, for any bytes: fills `values`, 2 * layers * tokens * channels bytes, or tells what is wrong. */
EXPORT int pdkv_bexp3_decode(int level, const uint8_t *payload, size_t size, size_t layers, size_t tokens,
                             size_t channels, size_t group, uint8_t *values)
{
    const struct tile_functions *functions = tile_functions(level);
    const struct layout at = layout_of(layers, tokens, channels, group);
    word_t *words = (word_t *)values;
    size_t element = 0;

    if (size < at.escapes)
        return WRONG_LENGTH;
    uint64_t announced = 0;
    for (size_t number = 0; number < at.tiles; number++)
        announced += escape_count(payload, number);
    if (announced != size - at.escapes)
        return WRONG_LENGTH;
    if (at.count % 8)
        for (size_t p = 1; p <= 3; p++)
            if (payload[at.planes + p * at.plane_bytes - 1] >> at.count % 8)
                return WRONG_PADDING;

    const uint8_t *escapes = payload + at.escapes;
    for (size_t number = 0; number < at.tiles; number++) {
        const struct tile tile = tile_at((uint8_t *)payload, &at, channels, number, element);
        const size_t rows = tile_tokens(number, tokens, group);
        const uint8_t *end = escapes + escape_count(payload, number);

        if (channels % 8)
            escapes = decode_bitwise(tile, rows, channels, element % 8, escapes, end, words + element);
        else
            escapes = functions->decode_tile(tile, rows, channels, escapes, end, words + element);
        if (escapes != end)
            return WRONG_ESCAPES;
        element += rows * channels;
    }
    return DECODED;
}
