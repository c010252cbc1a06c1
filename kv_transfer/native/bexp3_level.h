/* Tiles of the codec bexp3 at one dispatch level. Included once for each, with these defined:
 *
 *   LEVEL(name)     the name with the level's suffix
 *   TARGET          attribute of functions at this level, or nothing
 *
 * and LEVEL(encode_block) and LEVEL(decode_block) in scope. A row (the channels of one token) is a number of blocks;
 * its last channels, if fewer than a block's, go through one that is filled up with zeros.
 */

TARGET static void LEVEL(find_maxima)(const word_t *restrict values, size_t tokens, size_t channels,
                                      uint8_t *restrict maxima)
{
    memset(maxima, 0, channels);
    for (size_t token = 0; token < tokens; token++, values += channels)
        for (size_t channel = 0; channel < channels; channel++) {
            uint8_t exponent = word_high(values[channel]);
            maxima[channel] = exponent > maxima[channel] ? exponent : maxima[channel];
        }
}

TARGET static uint8_t *LEVEL(encode_tile)(const word_t *values, size_t tokens, size_t channels, struct tile tile,
                                          uint8_t *escapes)
{
    const size_t rest = channels % BLOCK;
    uint8_t *low = tile.low, *plane_0 = tile.planes[0], *plane_1 = tile.planes[1], *plane_2 = tile.planes[2];
    struct planes bits;

    for (; tokens; tokens--) {
        const uint8_t *maxima = tile.maxima, *row_end = maxima + channels - rest;
        for (; maxima < row_end; maxima += BLOCK, values += BLOCK, low += BLOCK) {
            bits = LEVEL(encode_block)(values, maxima, low);
            memcpy(plane_0, &bits.p0, BLOCK / 8);
            memcpy(plane_1, &bits.p1, BLOCK / 8);
            memcpy(plane_2, &bits.p2, BLOCK / 8);
            plane_0 += BLOCK / 8, plane_1 += BLOCK / 8, plane_2 += BLOCK / 8;
            escapes = take_escapes(bits, values, escapes);
        }
        if (rest) {
            word_t last_values[BLOCK] = {0};
            uint8_t last_maxima[BLOCK] = {0}, last_low[BLOCK];
            memcpy(last_values, values, 2 * rest);
            memcpy(last_maxima, maxima, rest);
            bits = LEVEL(encode_block)(last_values, last_maxima, last_low);
            memcpy(low, last_low, rest);
            memcpy(plane_0, &bits.p0, rest / 8);
            memcpy(plane_1, &bits.p1, rest / 8);
            memcpy(plane_2, &bits.p2, rest / 8);
            escapes = take_escapes(bits, last_values, escapes);
            values += rest, low += rest, plane_0 += rest / 8, plane_1 += rest / 8, plane_2 += rest / 8;
        }
    }
    return escapes;
}

TARGET static const uint8_t *LEVEL(decode_tile)(struct tile tile, size_t tokens, size_t channels,
                                                const uint8_t *escapes, const uint8_t *end, word_t *values)
{
    const size_t rest = channels % BLOCK;
    const uint8_t *low = tile.low, *plane_0 = tile.planes[0], *plane_1 = tile.planes[1], *plane_2 = tile.planes[2];
    struct planes bits;

    for (; tokens; tokens--) {
        const uint8_t *maxima = tile.maxima, *row_end = maxima + channels - rest;
        for (; maxima < row_end; maxima += BLOCK, values += BLOCK, low += BLOCK) {
            memcpy(&bits.p0, plane_0, BLOCK / 8);
            memcpy(&bits.p1, plane_1, BLOCK / 8);
            memcpy(&bits.p2, plane_2, BLOCK / 8);
            plane_0 += BLOCK / 8, plane_1 += BLOCK / 8, plane_2 += BLOCK / 8;
            LEVEL(decode_block)(bits, maxima, low, values);
            escapes = put_escapes(bits, low, escapes, end, values);
            if (!escapes)
                return NULL;
        }
        if (rest) {
            uint8_t last_maxima[BLOCK] = {0}, last_low[BLOCK] = {0};
            word_t last_values[BLOCK];
            memcpy(last_maxima, maxima, rest);
            memcpy(last_low, low, rest);
            bits = (struct planes){0, 0, 0};
            memcpy(&bits.p0, plane_0, rest / 8);
            memcpy(&bits.p1, plane_1, rest / 8);
            memcpy(&bits.p2, plane_2, rest / 8);
            LEVEL(decode_block)(bits, last_maxima, last_low, last_values);
            escapes = put_escapes(bits, last_low, escapes, end, last_values);
            if (!escapes)
                return NULL;
            memcpy(values, last_values, 2 * rest);
            values += rest, low += rest, plane_0 += rest / 8, plane_1 += rest / 8, plane_2 += rest / 8;
        }
    }
    return escapes;
}

static const struct tile_functions LEVEL(functions) = {LEVEL(find_maxima), LEVEL(encode_tile), LEVEL(decode_tile)};

#undef LEVEL
#undef TARGET
