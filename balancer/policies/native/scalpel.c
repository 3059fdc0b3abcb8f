/* Layouts as bits: loads, ScalpeLB's swaps, and the matching of new packs with the servers that hold most of them already. */
#include "planning.h"

#include <math.h>
#include <string.h>

/* What is held of the row from `at` on: the next index, or `experts`. Few are held: eight are passed at a time. */
static inline ptrdiff_t
next_held(const uint8_t *row, ptrdiff_t at, ptrdiff_t experts)
{
    uint64_t eight;
    while (at + 8 <= experts && (memcpy(&eight, row + at, 8), eight == 0)) {
        at += 8;
    }
    while (at < experts && !row[at]) {
        at++;
    }
    return at;
}

void
count_held(const uint8_t *holds, ptrdiff_t servers, ptrdiff_t experts, int64_t *count)
{
    memset(count, 0, (size_t)experts * sizeof(*count));
    for (ptrdiff_t s = 0; s < servers; s++) {
        const uint8_t *row = holds + s * experts;
        for (ptrdiff_t e = next_held(row, 0, experts); e < experts; e = next_held(row, e + 1, experts)) {
            count[e]++;
        }
    }
}

/* Loads of servers, an expert's load in equal parts on those that hold it. Returns whether none holds more than its
 * slots; slots may be NULL. */
bool
held_load(const Layer *layer, const uint8_t *holds, const int64_t *count, const int64_t *slots, double *filled)
{
    ptrdiff_t experts = layer->experts;
    bool fits = true;
    for (ptrdiff_t s = 0; s < layer->servers; s++) {
        const uint8_t *row = holds + s * experts;
        int64_t held = 0;
        filled[s] = 0;
        for (ptrdiff_t e = next_held(row, 0, experts); e < experts; e = next_held(row, e + 1, experts)) {
            filled[s] += layer->load[e] / (double)count[e];
            held++;
        }
        fits &= slots == NULL || held <= slots[s];
    }
    return fits;
}

void
equal_shares(const uint8_t *holds, ptrdiff_t servers, ptrdiff_t experts, const int64_t *count, double *shares)
{
    for (ptrdiff_t s = 0; s < servers; s++) {
        const uint8_t *row = holds + s * experts;
        for (ptrdiff_t e = next_held(row, 0, experts); e < experts; e = next_held(row, e + 1, experts)) {
            shares[s * experts + e] = 1.0 / (double)count[e];
        }
    }
}

/* The experts that a pack of a compact placement and a server have in common (packs x servers). */
void
count_overlap(ptrdiff_t servers, ptrdiff_t experts, const int64_t *count, const int32_t *server,
              const uint8_t *current, ptrdiff_t *start, int32_t *overlap)
{
    ptrdiff_t sum = 0;
    for (ptrdiff_t e = 0; e < experts; e++) {
        start[e] = sum;
        sum += count[e];
    }
    memset(overlap, 0, (size_t)(servers * servers) * sizeof(*overlap));
    for (ptrdiff_t s = 0; s < servers; s++) {
        const uint8_t *row = current + s * experts;
        for (ptrdiff_t e = next_held(row, 0, experts); e < experts; e = next_held(row, e + 1, experts)) {
            for (int64_t i = 0; i < count[e]; i++) {
                int32_t pack = server[start[e] + i];
                if (pack >= 0) {
                    overlap[pack * servers + s]++;
                }
            }
        }
    }
}

/* While it lowers the peak, and `budget` times at most: the hottest expert of the hottest server changes places
 * with the coldest of the coldest. Returns how often. */
int64_t
swap_hottest(const Layer *layer, uint8_t *holds, int64_t budget, double *filled, int64_t *count)
{
    ptrdiff_t experts = layer->experts, servers = layer->servers;
    count_held(holds, servers, experts, count);
    held_load(layer, holds, count, NULL, filled);
    for (int64_t swaps = 0; swaps < budget; swaps++) {
        ptrdiff_t hot = 0, cold = 0, hottest = -1, coldest = -1;
        double most = -1, least = INFINITY;
        for (ptrdiff_t s = 1; s < servers; s++) {
            hot = filled[s] / layer->speed[s] > filled[hot] / layer->speed[hot] ? s : hot;
            cold = filled[s] / layer->speed[s] < filled[cold] / layer->speed[cold] ? s : cold;
        }
        uint8_t *from = holds + hot * experts, *to = holds + cold * experts;
        for (ptrdiff_t e = 0; e < experts; e++) {
            if (from[e] == to[e]) {
                continue; /* None of both, or no second replica there. */
            }
            double value = layer->load[e] / (double)count[e];
            if (from[e] && value > most) {
                most = value;
                hottest = e;
            }
            if (to[e] && value < least) {
                least = value;
                coldest = e;
            }
        }
        if (hottest < 0 || coldest < 0) {
            return swaps;
        }
        double hot_after = filled[hot] - most + least, cold_after = filled[cold] + most - least;
        double peak = fmax(hot_after / layer->speed[hot], cold_after / layer->speed[cold]);
        /* Rounding alone is no gain. */
        if (!(peak < filled[hot] / layer->speed[hot] * (1 - 1e-12))) {
            return swaps;
        }
        from[hottest] = to[coldest] = 0;
        from[coldest] = to[hottest] = 1;
        filled[hot] = hot_after;
        filled[cold] = cold_after;
    }
    return budget;
}

/* `overlap` (packs x servers) counts the experts of a pack that a server holds; packs and servers of one `kind`
 * only are matched. Most overlap first, of equal ones the first pack, then the first server. `pairs` and `sorting`
 * have room for servers x servers. */
void
match_greedy(ptrdiff_t servers, const int32_t *overlap, const int64_t *kind, int64_t *server_of, Entry *pairs,
             Entry *sorting)
{
    ptrdiff_t size = 0;
    for (ptrdiff_t i = 0; i < servers * servers; i++) {
        if (overlap[i] > 0 && kind[i / servers] == kind[i % servers]) {
            pairs[size++] = (Entry){-(double)overlap[i], (int32_t)i};
        }
    }
    sort_entries(pairs, sorting, size);
    uint8_t *taken = (uint8_t *)sorting;
    memset(taken, 0, (size_t)servers);
    for (ptrdiff_t pack = 0; pack < servers; pack++) {
        server_of[pack] = -1;
    }
    for (ptrdiff_t i = 0; i < size; i++) {
        ptrdiff_t pack = pairs[i].item / servers, server = pairs[i].item % servers;
        if (server_of[pack] < 0 && !taken[server]) {
            server_of[pack] = server;
            taken[server] = 1;
        }
    }
    for (ptrdiff_t pack = 0; pack < servers; pack++) {
        for (ptrdiff_t server = 0; server < servers && server_of[pack] < 0; server++) {
            if (!taken[server] && kind[server] == kind[pack]) {
                server_of[pack] = server;
                taken[server] = 1;
            }
        }
    }
}

/* The same with the greatest sum of overlaps: the Hungarian method, by shortest augmenting paths with potentials
 * (Jonker and Volgenant 1987), O(servers^3). Room: 3 x (servers + 1) doubles and as many integers. */
void
match_optimal(ptrdiff_t servers, const int32_t *overlap, const int64_t *kind, int64_t *server_of, double *doubles,
              int64_t *ints)
{
    const double never = 1e9;
    ptrdiff_t n = servers;
    double *of_pack = doubles, *of_server = of_pack + n + 1, *slack = of_server + n + 1;
    int64_t *pack_at = ints, *way = pack_at + n + 1, *seen = way + n + 1;
    memset(doubles, 0, (size_t)(3 * (n + 1)) * sizeof(*doubles));
    memset(ints, 0, (size_t)(3 * (n + 1)) * sizeof(*ints));
    /* Rows and columns count from 1; column 0 is where each path begins. */
    for (ptrdiff_t pack = 1; pack <= n; pack++) {
        ptrdiff_t column = 0;
        pack_at[0] = pack;
        for (ptrdiff_t j = 0; j <= n; j++) {
            slack[j] = INFINITY;
            seen[j] = 0;
        }
        do {
            ptrdiff_t row = (ptrdiff_t)pack_at[column], next = 0;
            double least = INFINITY;
            seen[column] = 1;
            for (ptrdiff_t j = 1; j <= n; j++) {
                if (seen[j]) {
                    continue;
                }
                double cost = kind[row - 1] == kind[j - 1] ? -(double)overlap[(row - 1) * n + j - 1] : never;
                double reduced = cost - of_pack[row] - of_server[j];
                if (reduced < slack[j]) {
                    slack[j] = reduced;
                    way[j] = column;
                }
                if (slack[j] < least) {
                    least = slack[j];
                    next = j;
                }
            }
            for (ptrdiff_t j = 0; j <= n; j++) {
                if (seen[j]) {
                    of_pack[pack_at[j]] += least;
                    of_server[j] -= least;
                } else {
                    slack[j] -= least;
                }
            }
            column = next;
        } while (pack_at[column] != 0);
        for (; column != 0; column = (ptrdiff_t)way[column]) {
            pack_at[column] = pack_at[way[column]];
        }
    }
    for (ptrdiff_t j = 1; j <= n; j++) {
        server_of[pack_at[j] - 1] = j - 1;
    }
}
