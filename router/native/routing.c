/* What a choice of workers asks of all of them, in one pass each over the fleet's columns.
 *
 * These are the formulas of router/candidates.py and router/ranking.py (policy `cost`), under the same names and in
 * the same order of operations, so that the results are the same bits: nothing may be contracted to a fused
 * multiply-add, or put in another order. Columns are those of router/fleet.py. The constants come from there, too.
 */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __clang__ /* gcc does not with -std=c11 */
#pragma STDC FP_CONTRACT OFF
#endif

#define API __attribute__((visibility("default")))

/* The loops over workers are written for vectors; wider ones are taken where the processor has them. */
#if defined(__x86_64__) && defined(__gnu_linux__)
#define CLONES __attribute__((target_clones("avx2", "default")))
#else
#define CLONES
#endif

/* Columns of the table, in the order of router.fleet.COLUMNS; whoever loads this compares the names. */
#define COLUMNS(NAME)                                                                                                  \
    NAME(block_size) NAME(capacity_tokens) NAME(free_blocks) NAME(requests) NAME(queued_prefill_tokens)                \
    NAME(max_num_batched_tokens) NAME(prompt_limit) NAME(room_tokens) NAME(room_if_given_way) NAME(decisions)          \
    NAME(draws) NAME(queued_ms) NAME(prompt_base_ms) NAME(prompt_token_ms) NAME(prompt_attended_ms) NAME(stream_ms)    \
    NAME(stream_attended_ms)

#define AS_NUMBER(name) column_##name,
#define AS_TEXT(name) #name " "
enum column { COLUMNS(AS_NUMBER) };

API const char *pdrt_columns(void) { return COLUMNS(AS_TEXT); }

/* Bits of a worker's standing: router.candidates.Is. */
enum {
    PREFILL_POOL = 1 << 0,
    PREFILLS = 1 << 1,
    DECODE_POOL = 1 << 2,
    DECODES = 1 << 3,
    DECODES_SAMPLES = 1 << 4,
    AGGREGATED = 1 << 5,
    WHOLE = 1 << 6,
    WHOLE_CALMLY = 1 << 7,
    CAN_PREFILL = 1 << 8,
    RUNS_WHOLE_NOW = 1 << 9,
    TAKES_TICKET = 1 << 10,
    TAKES_TICKET_IF_GIVEN_WAY = 1 << 11,
    AVOIDED = 1 << 12,
};

/* What all choices have in common. */
struct prices {
    double priced_tokens, work_price, here_price, stream_price, alike, most;
    uint64_t spread;
};

/* The columns of a fleet, good as long as no other ones take their place. */
struct fleet {
    const double *table;  /* [columns, size] */
    const uint8_t *roles; /* [3, size], 0 or 1: prefill, decode, aggregated */
    size_t size;          /* workers */
    const struct prices *prices;
    double *scratch;      /* [5, size], and the answers behind that: each function finds what others left */
};

/* What KV takes from one worker to others: milliseconds a token, by number, nan for those it has sent nothing. */
struct link_row {
    const double *token_ms; /* [size] */
    size_t size;
};

/* One choice. */
struct choice {
    const struct fleet *fleet;
    const double *cached;   /* [fleet size]: tokens of the prompt that they have; NULL if nobody has any */
    const uint8_t *exclude; /* [fleet size], 0 or 1, or NULL */
    const uint8_t *avoid;   /* the same */
    double prompt_tokens, total_tokens, other_samples, itl_ms;
    uint64_t draw;
    uint64_t interactive;   /* batch requests give way to it */
    uint64_t decoders;      /* somebody serves who is there to decode */
    const struct link_row *links; /* [linked]: by number; token_ms is NULL of those that have sent nothing */
    size_t linked;
    double usual_ms;        /* of pairs that have exchanged nothing */
    struct { uint64_t prefill, decode, whole; } ahead; /* kinds of what is looked for at once; 0: nothing is */
};

struct best {
    int64_t number;         /* -1: there is none */
    double cost_ms, lacking, computing_ms, queued_ms, exposed_ms;
};

/* Answers: those found ahead, and what was asked for last. */
enum answer { PREFILL_AHEAD, DECODE_AHEAD, WHOLE_AHEAD, ASKED };

#define COLUMN(name) const double *restrict name = c->fleet->table + (size_t)(column_##name) * size
#define SCRATCH(type, name, at) type *restrict name = (type *)(c->fleet->scratch + (size_t)(at) * size)
enum { STANDING, COSTS, LACKING, COMPUTING, ROWS, ANSWERS };

/* Small counts, rounded up: adding 2^52 leaves no room for a fraction. */
static inline double rounded_up(double value) {
    double nearest = (value + 0x1p52) - 0x1p52;
    return nearest + (nearest < value ? 1.0 : 0.0);
}

static inline double larger(double a, double b) { return a > b ? a : b; }

static inline double smaller(double a, double b) { return a < b ? a : b; }

/* Fills `standing`, and what is lacking and takes computing; returns the bits that at least one worker has. */
static CLONES uint64_t survey(const struct choice *c) {
    const size_t size = c->fleet->size;
    const uint8_t *restrict prefill = c->fleet->roles;
    const uint8_t *restrict decode = prefill + size, *restrict aggregated = decode + size;
    const double prompt_tokens = c->prompt_tokens, total_tokens = c->total_tokens, tokens = prompt_tokens + 1;
    const double other_samples = c->other_samples, itl_ms = c->itl_ms;
    const uint64_t decoders = c->decoders ? 1 : 0;
    COLUMN(block_size); COLUMN(capacity_tokens); COLUMN(requests); COLUMN(max_num_batched_tokens);
    COLUMN(prompt_limit); COLUMN(room_tokens); COLUMN(room_if_given_way); COLUMN(prompt_base_ms);
    COLUMN(prompt_token_ms); COLUMN(prompt_attended_ms); COLUMN(stream_ms); COLUMN(stream_attended_ms);
    const double *restrict room_whole = c->interactive ? room_if_given_way : room_tokens;
    SCRATCH(uint64_t, standing, STANDING);
    SCRATCH(double, lacking, LACKING);
    SCRATCH(double, computing_ms, COMPUTING);
    uint64_t there = 0;

    if (c->cached) {
        const double *restrict cached = c->cached;
        for (size_t i = 0; i < size; i++)
            lacking[i] = larger(prompt_tokens - cached[i], 1.0);
    } else {
        for (size_t i = 0; i < size; i++)
            lacking[i] = larger(prompt_tokens, 1.0);
    }
    for (size_t i = 0; i < size; i++) {
        double attended = lacking[i] * (prompt_tokens - 0.5 * lacking[i]);
        double steps = rounded_up(lacking[i] / max_num_batched_tokens[i]);
        computing_ms[i] = prompt_base_ms[i] * steps + prompt_token_ms[i] * lacking[i] + prompt_attended_ms[i] * attended;
    }
    for (size_t i = 0; i < size; i++) {
        double ticket = tokens + other_samples * block_size[i];
        uint64_t p = prefill[i], d = decode[i], a = aggregated[i];
        uint64_t holds = capacity_tokens[i] >= total_tokens ? 1 : 0;
        uint64_t fits = capacity_tokens[i] > prompt_tokens ? 1 : 0;
        uint64_t all_samples = ticket <= capacity_tokens[i] ? 1 : 0;
        uint64_t computes = prompt_limit[i] >= lacking[i] ? 1 : 0;
        uint64_t runs = room_whole[i] >= tokens ? computes : 0;
        uint64_t takes = room_tokens[i] >= ticket ? 1 : 0;
        uint64_t takes_if = room_if_given_way[i] >= ticket ? 1 : 0;
        uint64_t whole = (decoders ? d | a : p) & holds;
        standing[i] = p * PREFILL_POOL | (p & fits) * PREFILLS | d * DECODE_POOL | (d & holds) * DECODES |
                      (d & holds & all_samples) * DECODES_SAMPLES | (a & holds) * AGGREGATED | whole * WHOLE |
                      whole * WHOLE_CALMLY | computes * CAN_PREFILL | runs * RUNS_WHOLE_NOW | takes * TAKES_TICKET |
                      takes_if * TAKES_TICKET_IF_GIVEN_WAY;
    }
    if (itl_ms)
        for (size_t i = 0; i < size; i++) {
            double step_ms = stream_ms[i] + stream_attended_ms[i] * prompt_tokens;
            double each = prompt_token_ms[i] + prompt_attended_ms[i] * prompt_tokens;
            double in_step = smaller(lacking[i], max_num_batched_tokens[i]);
            double mixed_step_ms = step_ms + prompt_base_ms[i] + in_step * each;
            uint64_t idle = requests[i] == 0 ? 1 : 0, calm = mixed_step_ms <= itl_ms ? 1 : 0;
            standing[i] &= ~((1 - (idle | calm)) * WHOLE_CALMLY);
        }
    if (c->exclude)
        for (size_t i = 0; i < size; i++)
            standing[i] &= (uint64_t)c->exclude[i] - 1;
    if (c->avoid)
        for (size_t i = 0; i < size; i++)
            standing[i] |= c->avoid[i] * AVOIDED;
    for (size_t i = 0; i < size; i++)
        there |= standing[i];
    return there;
}

/* -- the choice ---------------------------------------------------------------------------------------------------- */

/* Whose bits, of those in `of`, are `who`. Those that are avoided are left out if there are others. */
struct among {
    uint64_t of, who;
};

/* Added to a cost: it stays the same, or is none. */
static inline double apart(struct among among, uint64_t standing) {
    return (standing & among.of) == among.who ? 0.0 : INFINITY;
}

static struct among among_of(const struct choice *c, uint64_t who) {
    const size_t size = c->fleet->size;
    SCRATCH(const uint64_t, standing, STANDING);
    if (c->avoid)
        for (size_t i = 0; i < size; i++)
            if ((standing[i] & (who | AVOIDED)) == who)
                return (struct among){who | AVOIDED, who};
    return (struct among){who, who};
}

/* Of those whose cost, in `costs`, is alike the lowest: one key after the other, the lowest (by its sign) wins; then
 * the draw. */
static inline void choose(const struct choice *c, struct best *best, int keys, const double *const *key,
                          const int *sign) {
    const size_t size = c->fleet->size;
    COLUMN(queued_ms); COLUMN(draws);
    SCRATCH(const double, costs, COSTS);
    SCRATCH(const double, lacking, LACKING);
    SCRATCH(const double, computing_ms, COMPUTING);
    SCRATCH(uint64_t, rows, ROWS);
    double lows[8] = {INFINITY, INFINITY, INFINITY, INFINITY, INFINITY, INFINITY, INFINITY, INFINITY};
    double lowest = INFINITY, limit;
    size_t i = 0, count = 0;
    for (; i + 8 <= size; i += 8)
        for (size_t k = 0; k < 8; k++)
            lows[k] = smaller(costs[i + k], lows[k]);
    for (; i < size; i++)
        lows[0] = smaller(costs[i], lows[0]);
    for (size_t k = 0; k < 8; k++)
        lowest = smaller(lows[k], lowest);
    limit = smaller((1 + c->fleet->prices->alike) * lowest, c->fleet->prices->most);
    for (i = 0; i < size; i++) {
        rows[count] = i;
        count += costs[i] <= limit;
    }
    best->number = -1;
    if (!count)
        return;
    for (int k = 0; k < keys && count > 1; k++) {
        double low = INFINITY;
        size_t left = 0;
        for (size_t r = 0; r < count; r++)
            low = smaller(sign[k] * key[k][rows[r]], low);
        for (size_t r = 0; r < count; r++) {
            size_t row = rows[r];
            rows[left] = row;
            left += sign[k] * key[k][row] == low;
        }
        count = left;
    }
    size_t chosen = rows[0];
    const uint64_t spread = c->fleet->prices->spread, draw = c->draw * spread;
    uint64_t low = ((uint64_t)draws[chosen] ^ draw) * spread;
    for (size_t r = 1; r < count; r++) {
        uint64_t mixed = ((uint64_t)draws[rows[r]] ^ draw) * spread;
        if (mixed < low)
            low = mixed, chosen = rows[r];
    }
    best->number = (int64_t)chosen;
    best->cost_ms = costs[chosen];
    best->lacking = lacking[chosen];
    best->computing_ms = computing_ms[chosen];
    best->queued_ms = queued_ms[chosen];
    best->exposed_ms = 0.0;
}

/* The worker that is to compute the prompt. */
static CLONES void prefill(const struct choice *c, uint64_t who, struct best *best) {
    const size_t size = c->fleet->size;
    const struct among among = among_of(c, who);
    const double price = 1 + c->fleet->prices->work_price;
    COLUMN(queued_ms); COLUMN(queued_prefill_tokens); COLUMN(requests); COLUMN(decisions);
    SCRATCH(const uint64_t, standing, STANDING);
    SCRATCH(const double, computing_ms, COMPUTING);
    SCRATCH(double, costs, COSTS);
    for (size_t i = 0; i < size; i++) {
        double cost = queued_ms[i] + price * computing_ms[i];
        costs[i] = cost + apart(among, standing[i]);
    }
    choose(c, best, 3, (const double *const[]){queued_prefill_tokens, requests, decisions}, (const int[]){1, 1, 1});
}

/* What is left of the transfer of the prompt when it has been computed. */
static inline double exposed(double token_ms, double lacking, double computed_ms) {
    return larger(token_ms * lacking - computed_ms, 0.0);
}

/* The worker that is to get the prompt's KV, from `first` unless that is -1, and to generate. `computed_ms`: what
 * computing the prompt takes there. */
static CLONES void decode(const struct choice *c, uint64_t who, int64_t first, double computed_ms, struct best *best) {
    const size_t size = c->fleet->size;
    const struct among among = among_of(c, who);
    const double priced_tokens = c->fleet->prices->priced_tokens, prompt_tokens = c->prompt_tokens;
    COLUMN(requests); COLUMN(free_blocks); COLUMN(decisions); COLUMN(stream_ms); COLUMN(stream_attended_ms);
    SCRATCH(const uint64_t, standing, STANDING);
    SCRATCH(const double, lacking, LACKING);
    SCRATCH(double, costs, COSTS);
    const double *restrict links = NULL;
    double usual = 0.0;
    size_t linked = 0;
    if (first < 0) {
        computed_ms = 0.0;
    } else {
        usual = c->usual_ms;
        if ((size_t)first < c->linked) {
            const struct link_row row = c->links[first];
            links = row.token_ms;
            linked = row.size < size ? row.size : size;
        }
    }
    for (size_t i = 0; i < linked; i++)
        costs[i] = exposed(links[i] == links[i] ? links[i] : usual, lacking[i], computed_ms);
    for (size_t i = linked; i < size; i++)
        costs[i] = exposed(usual, lacking[i], computed_ms);
    for (size_t i = 0; i < size; i++) {
        double step_ms = stream_ms[i] + stream_attended_ms[i] * prompt_tokens;
        double cost = priced_tokens * step_ms + costs[i];
        costs[i] = cost + apart(among, standing[i]);
    }
    choose(c, best, 3, (const double *const[]){requests, free_blocks, decisions}, (const int[]){1, -1, 1});
    if (best->number >= 0) {
        size_t i = (size_t)best->number;
        best->exposed_ms = exposed(i < linked && links[i] == links[i] ? links[i] : usual, lacking[i], computed_ms);
    }
}

/* The worker that is to run the request as a whole. */
static CLONES void whole(const struct choice *c, uint64_t who, struct best *best) {
    const size_t size = c->fleet->size;
    const struct among among = among_of(c, who);
    const struct prices *p = c->fleet->prices;
    const double here = 1 + p->work_price + p->here_price, stream_price = p->stream_price;
    const double priced_tokens = p->priced_tokens, prompt_tokens = c->prompt_tokens;
    COLUMN(queued_ms); COLUMN(queued_prefill_tokens); COLUMN(requests); COLUMN(free_blocks); COLUMN(decisions);
    COLUMN(stream_ms); COLUMN(stream_attended_ms);
    SCRATCH(const uint64_t, standing, STANDING);
    SCRATCH(const double, computing_ms, COMPUTING);
    SCRATCH(double, costs, COSTS);
    for (size_t i = 0; i < size; i++) {
        double step_ms = stream_ms[i] + stream_attended_ms[i] * prompt_tokens;
        double price = here + stream_price * requests[i];
        double cost = queued_ms[i] + price * computing_ms[i] + priced_tokens * step_ms;
        costs[i] = cost + apart(among, standing[i]);
    }
    choose(c, best, 4, (const double *const[]){requests, queued_prefill_tokens, free_blocks, decisions},
           (const int[]){1, 1, -1, 1});
}

static struct best *answer(const struct choice *c, enum answer number) {
    const size_t size = c->fleet->size;
    SCRATCH(struct best, answers, ANSWERS);
    return answers + number;
}

/* Looks at all workers, and for the best ones of the kinds in `ahead`: `decode` gets the KV from `prefill`, if that is
 * looked for and found. Returns the bits that at least one worker has. To be called before the functions below. */
API uint64_t pdrt_look(const struct choice *c) {
    const uint64_t there = survey(c);
    struct best *first = answer(c, PREFILL_AHEAD);
    first->number = -1;
    if (c->ahead.prefill)
        prefill(c, c->ahead.prefill, first);
    if (c->ahead.decode)
        decode(c, c->ahead.decode, first->number, first->computing_ms, answer(c, DECODE_AHEAD));
    if (c->ahead.whole)
        whole(c, c->ahead.whole, answer(c, WHOLE_AHEAD));
    return there;
}

API void pdrt_prefill(const struct choice *c, uint64_t who) { prefill(c, who, answer(c, ASKED)); }

API void pdrt_decode(const struct choice *c, uint64_t who, int64_t first, double computed_ms) {
    decode(c, who, first, computed_ms, answer(c, ASKED));
}

API void pdrt_whole(const struct choice *c, uint64_t who) { whole(c, who, answer(c, ASKED)); }

/* -- sets of workers ------------------------------------------------------------------------------------------------ */

/* column[n] = values[g] for each n in set g, unless there is more, for `count` sets of `words` words, bit n % 64 of word
 * n / 64 (of any alignment); numbers of `size` or more are passed over. */
API void pdrt_spread(const unsigned char *sets, size_t count, size_t words, const double *values, double *column,
                     size_t size) {
    for (size_t g = 0; g < count; g++)
        for (size_t w = 0; w < words; w++) {
            uint64_t left;
            memcpy(&left, sets + (g * words + w) * sizeof(left), sizeof(left));
            for (; left; left &= left - 1) {
                size_t number = 64 * w + (size_t)__builtin_ctzll(left);
                if (number < size)
                    column[number] = larger(column[number], values[g]);
            }
        }
}
