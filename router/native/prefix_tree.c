/* Prompts that workers were sent, as a radix tree: router/prefix_tree.py in C.
 *
 * Edges are found by their parent and their first name in one table for all, by open addressing.
 */

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "names.h"

enum { FIRST_SLOTS = 64, FIRST_CROWD = 2, SIZES = 48, SPARE_BYTES = 1 << 22 };

struct crowd {
    uint32_t worker, prompts; /* how many of its prompts go through an edge or end there, never 0 */
};

struct edge {
    struct edge *parent;  /* NULL: the root */
    unsigned char *names; /* in a block of 2^size names */
    size_t count, size;   /* count of names: 0 at the root only */
    struct crowd *crowd;  /* in rising order of workers */
    size_t workers, room;
};

struct slot {
    uint64_t hash;
    struct edge *edge; /* NULL: empty */
};

/* What names are in when they are not in use. */
struct block {
    struct block *next;
};

struct tree {
    size_t names; /* of all edges; read from outside, so the first */
    uint64_t seed[2];
    struct edge root;
    struct slot *slots; /* a power of two of them, at most 3/4 in use */
    size_t mask, used;
    struct block *spare[SIZES];
    size_t spare_bytes;
};

/* -- blocks of names ---------------------------------------------------------------------------------------------------
 * Most are some kilobytes and live as long as a thousand others: an allocator for all sizes takes longer to find one
 * than it takes to fill it. */

static inline size_t size_for(size_t count) {
    size_t size = 0;
    while (((size_t)1 << size) < count)
        size++;
    return size;
}

static unsigned char *taken(struct tree *t, size_t size) {
    struct block *block = size < SIZES ? t->spare[size] : NULL;
    if (!block)
        return size < SIZES ? malloc((size_t)NAME << size) : NULL;
    t->spare[size] = block->next;
    t->spare_bytes -= (size_t)NAME << size;
    return (unsigned char *)block;
}

static void given_back(struct tree *t, unsigned char *names, size_t size) {
    struct block *block = (struct block *)names;
    if (!block)
        return;
    if (t->spare_bytes + ((size_t)NAME << size) > SPARE_BYTES) {
        free(block);
        return;
    }
    block->next = t->spare[size];
    t->spare[size] = block;
    t->spare_bytes += (size_t)NAME << size;
}

/* -- the table of edges ---------------------------------------------------------------------------------------------- */

static inline uint64_t hashed(const struct tree *t, const struct edge *parent, const unsigned char *first) {
    uint64_t name[NAME / 8];
    memcpy(name, first, NAME);
    name[0] ^= (uint64_t)(uintptr_t)parent;
    return hashed_name(t->seed, name);
}

/* Where the child of `parent` that begins with this name is, or would be. */
static struct slot *slot_of(const struct tree *t, uint64_t hash, const struct edge *parent, const unsigned char *first) {
    size_t at = hash & t->mask;
    for (;; at = (at + 1) & t->mask) {
        struct slot *slot = &t->slots[at];
        if (!slot->edge || (slot->hash == hash && slot->edge->parent == parent && !memcmp(slot->edge->names, first, NAME)))
            return slot;
    }
}

static struct edge *child_of(const struct tree *t, const struct edge *parent, const unsigned char *first) {
    return slot_of(t, hashed(t, parent, first), parent, first)->edge;
}

/* Room for one edge more; 0: no memory. */
static int widen(struct tree *t) {
    if (4 * (t->used + 1) <= 3 * (t->mask + 1))
        return 1;
    size_t mask = 2 * t->mask + 1;
    struct slot *slots = calloc(mask + 1, sizeof(struct slot));
    if (!slots)
        return 0;
    for (size_t at = 0; at <= t->mask; at++) {
        size_t to = t->slots[at].hash & mask;
        if (!t->slots[at].edge)
            continue;
        while (slots[to].edge)
            to = (to + 1) & mask;
        slots[to] = t->slots[at];
    }
    free(t->slots);
    t->slots = slots;
    t->mask = mask;
    return 1;
}

static void list(struct tree *t, struct edge *edge) {
    uint64_t hash = hashed(t, edge->parent, edge->names);
    *slot_of(t, hash, edge->parent, edge->names) = (struct slot){hash, edge};
    t->used++;
}

static void unlist(struct tree *t, const struct edge *edge) {
    size_t hole = (size_t)(slot_of(t, hashed(t, edge->parent, edge->names), edge->parent, edge->names) - t->slots);
    for (size_t at = (hole + 1) & t->mask; t->slots[at].edge; at = (at + 1) & t->mask) /* what was pushed over it moves back */
        if (((at - t->slots[at].hash) & t->mask) >= ((at - hole) & t->mask)) {
            t->slots[hole] = t->slots[at];
            hole = at;
        }
    t->slots[hole].edge = NULL;
    t->used--;
}

/* -- edges ------------------------------------------------------------------------------------------------------------ */

static void discard(struct tree *t, struct edge *edge) {
    given_back(t, edge->names, edge->size);
    free(edge->crowd);
    free(edge);
}

/* With a copy of these names, and room for so many workers; NULL: no memory. */
static struct edge *made(struct tree *t, struct edge *parent, const unsigned char *names, size_t count, size_t room) {
    const size_t size = size_for(count);
    struct edge *edge = calloc(1, sizeof(struct edge));
    if (!edge)
        return NULL;
    *edge = (struct edge){parent, taken(t, size), count, size, malloc(room * sizeof(struct crowd)), 0, room};
    if (!edge->names || !edge->crowd) {
        discard(t, edge);
        return NULL;
    }
    memcpy(edge->names, names, count * NAME);
    return edge;
}

/* How many of the edge's names are the first of these. A name stands for all blocks before it as well, so the first that
 * differs is found by halving. */
static size_t agreement(const struct edge *edge, const unsigned char *names, size_t count) {
    size_t same = 0, end = edge->count < count ? edge->count : count;
    if (!memcmp(edge->names + NAME * (end - 1), names + NAME * (end - 1), NAME))
        return end;
    while (end - same > 1) { /* the first `same` agree, and number `end` does not */
        size_t middle = (same + end) / 2;
        if (!memcmp(edge->names + NAME * (middle - 1), names + NAME * (middle - 1), NAME))
            same = middle;
        else
            end = middle;
    }
    return same;
}

static size_t place_of(const struct edge *edge, uint32_t worker) {
    size_t low = 0, high = edge->workers;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (edge->crowd[middle].worker < worker)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* One more prompt of the worker; 0: no memory. */
static int enter(struct edge *edge, uint32_t worker) {
    size_t at = place_of(edge, worker);
    if (at < edge->workers && edge->crowd[at].worker == worker) {
        edge->crowd[at].prompts++;
        return 1;
    }
    if (edge->workers == edge->room) {
        struct crowd *more = realloc(edge->crowd, 2 * edge->room * sizeof(struct crowd));
        if (!more)
            return 0;
        edge->crowd = more;
        edge->room *= 2;
    }
    memmove(edge->crowd + at + 1, edge->crowd + at, (edge->workers - at) * sizeof(struct crowd));
    edge->crowd[at] = (struct crowd){worker, 1};
    edge->workers++;
    return 1;
}

static void leave(struct edge *edge, uint32_t worker) {
    size_t at = place_of(edge, worker);
    if (--edge->crowd[at].prompts)
        return;
    edge->workers--;
    memmove(edge->crowd + at, edge->crowd + at + 1, (edge->workers - at) * sizeof(struct crowd));
}

/* What the first `common` names are becomes an edge of its own, above the rest, which stays the edge that it was: so
 * prompts that end there need not be told. Returns the upper one, or NULL: no memory. */
static struct edge *split(struct tree *t, struct edge *edge, size_t common) {
    struct edge *upper = widen(t) ? made(t, edge->parent, edge->names, common, edge->room) : NULL;
    if (!upper)
        return NULL;
    memcpy(upper->crowd, edge->crowd, edge->workers * sizeof(struct crowd));
    upper->workers = edge->workers;
    unlist(t, edge);
    edge->count -= common;
    size_t size = size_for(edge->count);
    unsigned char *rest = edge->names + NAME * common, *fewer = size < edge->size ? taken(t, size) : NULL;
    if (fewer) {
        memcpy(fewer, rest, NAME * edge->count);
        given_back(t, edge->names, edge->size);
        edge->names = fewer;
        edge->size = size;
    } else {
        memmove(edge->names, rest, NAME * edge->count);
    }
    edge->parent = upper;
    list(t, upper);
    list(t, edge);
    return upper;
}

/* -- for router/native/prefix_tree.py --------------------------------------------------------------------------------- */

API void pdrt_tree_free(struct tree *t) {
    for (size_t at = 0; t->slots && at <= t->mask; at++)
        if (t->slots[at].edge)
            discard(t, t->slots[at].edge);
    free(t->slots);
    for (size_t size = 0; size < SIZES; size++)
        while (t->spare[size]) {
            struct block *block = t->spare[size];
            t->spare[size] = block->next;
            free(block);
        }
    free(t);
}

API struct tree *pdrt_tree_new(uint64_t seed, uint64_t another) {
    struct tree *t = calloc(1, sizeof(struct tree));
    if (!t)
        return NULL;
    t->seed[0] = seed;
    t->seed[1] = another;
    t->mask = FIRST_SLOTS - 1;
    t->slots = calloc(FIRST_SLOTS, sizeof(struct slot));
    if (!t->slots) {
        pdrt_tree_free(t);
        return NULL;
    }
    return t;
}

/* The worker's prompt that ends at this edge is no longer there. The edge must not be used again if it was the last. */
API void pdrt_tree_leave(struct tree *t, uint32_t worker, struct edge *edge) {
    while (edge->parent) {
        struct edge *parent = edge->parent;
        leave(edge, worker);
        if (!edge->workers) {
            unlist(t, edge);
            t->names -= edge->count;
            discard(t, edge);
        }
        edge = parent;
    }
}

/* The worker was sent a prompt of these names, at least one. Returns the edge where it ends, or NULL: no memory, and
 * nothing has changed but that an edge may have been split. */
API struct edge *pdrt_tree_enter(struct tree *t, uint32_t worker, const unsigned char *names, size_t count) {
    struct edge *edge = &t->root;
    for (size_t depth = 0; depth < count; depth += edge->count) {
        const unsigned char *rest = names + NAME * depth;
        struct edge *child = child_of(t, edge, rest);
        if (!child) {
            child = widen(t) ? made(t, edge, rest, count - depth, FIRST_CROWD) : NULL;
            if (child) {
                list(t, child);
                t->names += child->count;
            }
        } else {
            size_t common = agreement(child, rest, count - depth);
            if (common < child->count)
                child = split(t, child, common);
        }
        if (!child || !enter(child, worker)) {
            pdrt_tree_leave(t, worker, edge);
            return NULL;
        }
        edge = child;
    }
    return edge;
}

/* The worker was sent a prompt that ends at this edge, as another one was. 0: no memory, and nothing has changed. */
API int pdrt_tree_join(uint32_t worker, struct edge *end) {
    for (struct edge *edge = end; edge->parent; edge = edge->parent)
        if (!enter(edge, worker)) {
            for (struct edge *undone = end; undone != edge; undone = undone->parent)
                leave(undone, worker);
            return 0;
        }
    return 1;
}

/* Who, `among` these (bit w % 64 of word w / 64), was sent at least so much of the beginning of this prompt, in rising
 * order of blocks. With a column, the workers of each group get `value` for every block, unless there is more; else
 * depths and sets [groups, words], zeros before, are written, at most one for each of `count` names. Returns how many
 * groups there are; those with a column have somebody in them. */
API size_t pdrt_tree_match(const struct tree *t, const unsigned char *names, size_t count, const uint64_t *among,
                           size_t words, double value, double *column, size_t size, uint64_t *depths, uint64_t *sets) {
    const struct edge *edge = &t->root;
    size_t depth = 0, groups = 0;
    while (depth < count && (edge = child_of(t, edge, names + NAME * depth))) {
        size_t before = groups;
        /* Behind an edge that the prompt leaves in its middle there is no next one: no name is at two depths. */
        depth += agreement(edge, names + NAME * depth, count - depth);
        for (size_t i = 0; i < edge->workers; i++) {
            size_t worker = edge->crowd[i].worker;
            if (worker / 64 >= words || !(among[worker / 64] >> worker % 64 & 1))
                continue;
            groups = before + 1;
            if (!column)
                sets[before * words + worker / 64] |= 1ull << worker % 64;
            else if (worker < size && column[worker] < value * (double)depth)
                column[worker] = value * (double)depth;
        }
        if (!column && groups > before)
            depths[before] = depth;
    }
    return groups;
}

/* For tests: whether what must hold between two calls does. */
API int pdrt_tree_intact(const struct tree *t) {
    size_t names = 0, edges = 0;
    for (size_t at = 0; at <= t->mask; at++) {
        const struct edge *edge = t->slots[at].edge;
        if (!edge)
            continue;
        edges++;
        names += edge->count;
        if (!edge->count || edge->count > (size_t)1 << edge->size || !edge->workers || child_of(t, edge->parent, edge->names) != edge)
            return 0;
        for (size_t i = 0; i < edge->workers; i++) {
            const struct crowd *here = &edge->crowd[i];
            if (!here->prompts || (i && here->worker <= here[-1].worker))
                return 0;
            if (edge->parent == &t->root)
                continue;
            size_t above = place_of(edge->parent, here->worker); /* whoever goes through here came by there */
            if (above == edge->parent->workers || edge->parent->crowd[above].worker != here->worker ||
                edge->parent->crowd[above].prompts < here->prompts)
                return 0;
        }
    }
    return names == t->names && edges == t->used;
}
