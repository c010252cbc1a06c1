/* Who holds which blocks: router/holders.py in C.
 *
 * A table of slots by open addressing, in shards, so that one that grows makes nobody wait for long. A slot's holders
 * are a single worker, or a set of them that slots share: successive blocks of a path are often held by the same.
 */

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "names.h"

enum { SHARDS = 256, FIRST_SLOTS = 16, RANGES = 72 };

struct set {
    uint32_t refs, words;
    uint64_t bits[];
};

/* 0: empty; odd: twice a worker's number, and 1; else a `struct set`. */
typedef uintptr_t holders;

struct slot {
    uint64_t name[NAME / 8];
    holders held;
};

struct shard {
    struct slot *slots; /* a power of two of them, at most 3/4 in use */
    size_t mask, used;
};

struct table {
    uint64_t seed[2];
    size_t names, words; /* words: of the largest set there can be, for the highest number that ever held anything */
    struct shard shards[SHARDS];
};

static inline uint64_t hashed(const struct table *t, const uint64_t *name) { return hashed_name(t->seed, name); }

static inline const struct shard *shard_of(const struct table *t, uint64_t hash) { return &t->shards[hash >> 56]; }

/* The slot of a name, or the empty one where it would be. */
static inline struct slot *slot_of(const struct shard *shard, const uint64_t *name, uint64_t hash) {
    size_t at = hash & shard->mask;
    while (shard->slots[at].held && (shard->slots[at].name[0] != name[0] || shard->slots[at].name[1] != name[1]))
        at = (at + 1) & shard->mask;
    return &shard->slots[at];
}

static inline int is_one(holders held) { return held & 1; }

static void keep(holders held) {
    if (held && !is_one(held))
        ((struct set *)held)->refs++;
}

static void drop(holders held) {
    if (held && !is_one(held) && !--((struct set *)held)->refs)
        free((struct set *)held);
}

static int grow(const struct table *t, struct shard *shard) {
    size_t count = 2 * (shard->mask + 1);
    struct shard larger = {calloc(count, sizeof(struct slot)), count - 1, shard->used};
    if (!larger.slots)
        return 0;
    for (size_t at = 0; at <= shard->mask; at++) {
        const struct slot *slot = &shard->slots[at];
        if (slot->held)
            *slot_of(&larger, slot->name, hashed(t, slot->name)) = *slot;
    }
    free(shard->slots);
    *shard = larger;
    return 1;
}

static void empty(const struct table *t, struct shard *shard, struct slot *slot) {
    size_t hole = (size_t)(slot - shard->slots), at = hole;
    shard->used--;
    for (;;) { /* what was pushed over it moves back */
        at = (at + 1) & shard->mask;
        if (!shard->slots[at].held)
            break;
        size_t home = hashed(t, shard->slots[at].name) & shard->mask;
        if (((at - home) & shard->mask) >= ((at - hole) & shard->mask)) {
            shard->slots[hole] = shard->slots[at];
            hole = at;
        }
    }
    shard->slots[hole].held = 0;
}

/* A new set: these holders with the worker, or without it. 0: no memory. */
static holders changed(const struct table *t, holders held, size_t worker, int with) {
    struct set *set;
    if (is_one(held) && !with)
        return 0; /* not asked for: a slot that nobody holds is emptied */
    set = calloc(1, sizeof(struct set) + t->words * sizeof(uint64_t));
    if (!set)
        return 0;
    set->refs = 1;
    set->words = (uint32_t)t->words;
    if (is_one(held))
        set->bits[(held >> 1) / 64] |= 1ull << (held >> 1) % 64;
    else
        memcpy(set->bits, ((struct set *)held)->bits, ((struct set *)held)->words * sizeof(uint64_t));
    if (with) {
        set->bits[worker / 64] |= 1ull << worker % 64;
        return (holders)set;
    }
    set->bits[worker / 64] &= ~(1ull << worker % 64);
    size_t left = 0, last = 0;
    for (size_t w = 0; w < set->words && left < 2; w++)
        if (set->bits[w]) {
            left += (set->bits[w] & (set->bits[w] - 1)) ? 2 : 1;
            last = 64 * w + (size_t)__builtin_ctzll(set->bits[w]);
        }
    if (left > 1)
        return (holders)set;
    free(set);
    return 2 * last + 1;
}

/* -- for router/native/holders.py ----------------------------------------------------------------------------------- */

API void pdrt_holders_free(struct table *t) {
    for (size_t s = 0; s < SHARDS; s++) {
        for (size_t at = 0; t->shards[s].slots && at <= t->shards[s].mask; at++)
            drop(t->shards[s].slots[at].held);
        free(t->shards[s].slots);
    }
    free(t);
}

API struct table *pdrt_holders_new(uint64_t seed, uint64_t another) {
    struct table *t = calloc(1, sizeof(struct table));
    if (!t)
        return NULL;
    t->seed[0] = seed;
    t->seed[1] = another;
    t->words = 1;
    for (size_t s = 0; s < SHARDS; s++) {
        t->shards[s].slots = calloc(FIRST_SLOTS, sizeof(struct slot));
        t->shards[s].mask = FIRST_SLOTS - 1;
        if (!t->shards[s].slots) {
            pdrt_holders_free(t);
            return NULL;
        }
    }
    return t;
}

API size_t pdrt_holders_names(const struct table *t) { return t->names; }

/* The worker holds these blocks from now on (`with`), or no longer. Returns how many were done: fewer than `count` if
 * there was no memory. */
API size_t pdrt_holders_change(struct table *t, size_t worker, const unsigned char *names, size_t count, int with) {
    holders seen = 0, shared = 0; /* the last set that was changed, and what became of it */
    size_t done = 0;
    if (with && worker / 64 >= t->words)
        t->words = worker / 64 + 1;
    for (; done < count; done++) {
        uint64_t name[NAME / 8];
        memcpy(name, names + NAME * done, NAME);
        uint64_t hash = hashed(t, name);
        struct shard *shard = &t->shards[hash >> 56];
        struct slot *slot = slot_of(shard, name, hash);
        if (!slot->held) {
            if (!with)
                continue;
            if (4 * (shard->used + 1) > 3 * (shard->mask + 1)) {
                if (!grow(t, shard))
                    break;
                slot = slot_of(shard, name, hash);
            }
            memcpy(slot->name, name, NAME);
            slot->held = 2 * worker + 1;
            shard->used++;
            t->names++;
        } else if (slot->held == 2 * worker + 1) {
            if (with)
                continue;
            empty(t, shard, slot);
            t->names--;
        } else if (is_one(slot->held) && !with) {
            continue;
        } else {
            if (slot->held != seen) {
                holders made = changed(t, slot->held, worker, with);
                if (!made)
                    break;
                drop(seen), drop(shared);
                seen = slot->held, keep(seen); /* kept, or another could get its address */
                shared = made;
            }
            keep(shared);
            drop(slot->held);
            slot->held = shared;
        }
    }
    drop(seen), drop(shared);
    return done;
}

/* All names, [names, NAME], and who holds them, [names, words], which are zeros before. */
API void pdrt_holders_dump(const struct table *t, unsigned char *names, uint64_t *sets) {
    size_t n = 0;
    for (size_t s = 0; s < SHARDS; s++)
        for (size_t at = 0; at <= t->shards[s].mask; at++) {
            const struct slot *slot = &t->shards[s].slots[at];
            if (!slot->held)
                continue;
            memcpy(names + NAME * n, slot->name, NAME);
            if (is_one(slot->held))
                sets[n * t->words + (slot->held >> 1) / 64] |= 1ull << (slot->held >> 1) % 64;
            else
                memcpy(sets + n * t->words, ((struct set *)slot->held)->bits,
                       ((struct set *)slot->held)->words * sizeof(uint64_t));
            n++;
        }
}

/* -- the longest beginnings ------------------------------------------------------------------------------------------ */

static inline void fetch(const struct table *t, const unsigned char *names, size_t depth) {
    uint64_t name[NAME / 8];
    memcpy(name, names + NAME * (depth - 1), NAME);
    uint64_t hash = hashed(t, name);
    const struct shard *shard = shard_of(t, hash);
    __builtin_prefetch(&shard->slots[hash & shard->mask]);
}

/* Who holds so many blocks, of `low`, and of `high`, who hold more anyway: into `out`. */
static inline void holding(const struct table *t, const unsigned char *names, size_t depth, const uint64_t *low,
                           const uint64_t *high, uint64_t *out) {
    uint64_t name[NAME / 8];
    memcpy(name, names + NAME * (depth - 1), NAME);
    uint64_t hash = hashed(t, name);
    holders held = slot_of(shard_of(t, hash), name, hash)->held;
    size_t words = t->words, known = 0;
    if (held && !is_one(held)) {
        const struct set *set = (const struct set *)held;
        for (; known < set->words; known++)
            out[known] = (set->bits[known] & low[known]) | high[known];
    }
    for (; known < words; known++)
        out[known] = high[known];
    if (is_one(held))
        out[(held >> 1) / 64] |= 1ull << (held >> 1) % 64 & low[(held >> 1) / 64];
}

/* See `Holders.match`: calls for groups in falling order of blocks. With a column, the workers of each get `value` for
 * every block; else depths and sets [groups, words] are written, at most one for each of `count` names. Returns how
 * many groups there are, or -1: no memory.
 *
 * `among`: [words]. */
API ptrdiff_t pdrt_holders_match(const struct table *t, const unsigned char *names, size_t count, const uint64_t *among,
                                 double value, double *column, size_t size, uint64_t *depths, uint64_t *sets) {
    const size_t words = t->words, bytes = words * sizeof(uint64_t);
    /* Ranges of depths, with the workers that hold the blocks up to either end; those that remain to be searched are
     * shallower, the next one last. Each is at most half of the one before it. */
    struct range {
        size_t low, high;
        uint64_t *holding_low, *holding_high;
    } ranges[RANGES], now;
    uint64_t *memory = malloc((2 * RANGES + 3) * bytes), *found = memory;
    size_t left = 0;
    ptrdiff_t groups = 0;
    if (!memory)
        return -1;
    now = (struct range){0, count + 1, memory + words, memory + 2 * words};
    memcpy(now.holding_low, among, bytes);
    memset(now.holding_high, 0, bytes); /* what is behind the last block nobody holds */
    for (size_t r = 0; r < RANGES; r++) {
        ranges[r].holding_low = memory + (3 + 2 * r) * words;
        ranges[r].holding_high = memory + (4 + 2 * r) * words;
    }
    for (;;) {
        while (now.high - now.low > 1) {
            /* Many prompts are like no other, which their first block shows. */
            size_t middle = now.low ? (now.low + now.high) / 2 : 1;
            size_t below = (now.low + middle) / 2, above = (middle + now.high) / 2;
            if (below > now.low)
                fetch(t, names, below);
            if (above < now.high && above > middle)
                fetch(t, names, above);
            /* Who holds more holds this, and who holds this holds less, known or not. */
            holding(t, names, middle, now.holding_low, now.holding_high, found);
            if (!memcmp(found, now.holding_high, bytes)) {
                now.high = middle;
            } else {
                if (memcmp(found, now.holding_low, bytes)) {
                    struct range *shallower = &ranges[left++];
                    shallower->low = now.low;
                    shallower->high = middle;
                    memcpy(shallower->holding_low, now.holding_low, bytes);
                    memcpy(shallower->holding_high, found, bytes);
                    memcpy(now.holding_low, found, bytes);
                }
                now.low = middle;
            }
        }
        if (now.low) {
            for (size_t w = 0; w < words; w++) {
                uint64_t group = now.holding_low[w] ^ now.holding_high[w];
                if (!column)
                    sets[(size_t)groups * words + w] = group;
                for (; column && group; group &= group - 1) {
                    size_t number = 64 * w + (size_t)__builtin_ctzll(group);
                    if (number < size)
                        column[number] = value * (double)now.low;
                }
            }
            if (!column)
                depths[groups] = now.low;
            groups++;
        }
        if (!left)
            break;
        left--;
        now.low = ranges[left].low;
        now.high = ranges[left].high;
        memcpy(now.holding_low, ranges[left].holding_low, bytes);
        memcpy(now.holding_high, ranges[left].holding_high, bytes);
    }
    free(memory);
    return groups;
}
