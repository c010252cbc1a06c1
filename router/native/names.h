/* Names of blocks: as good as random, `NAME` bytes each (pdcore/hashing.py). */

#ifndef PDRT_NAMES_H
#define PDRT_NAMES_H

#include <stdint.h>

#define API __attribute__((visibility("default")))

enum { NAME = 16 };

/* Seeded, so that nobody can choose prompts whose names fall together. */
static inline uint64_t hashed_name(const uint64_t *seed, const uint64_t *name) {
    unsigned __int128 product = (unsigned __int128)(name[0] ^ seed[0]) * (name[1] ^ seed[1]);
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

#endif
