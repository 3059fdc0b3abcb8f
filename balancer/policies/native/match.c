/* Matches new packs to the servers that hold most of them already. */
#include "planning.h"

#include <math.h>
#include <string.h>

#include "held.h"

typedef struct {
    int32_t server;
    int32_t common; /* experts that the pack and the server have in common, above 0 */
} Overlap;

typedef struct {
    HeldList held;
    int32_t *holder;      /* the servers of expert 0, then those of expert 1, ... */
    int32_t *first;       /* by expert, and the end: where its servers begin in that list */
    int32_t *packed;      /* by replica: the experts of pack 0, then those of pack 1, ... */
    int32_t *first_pack;  /* by pack, and the end */
    int32_t *common;      /* by server */
    Overlap *overlap;     /* those of pack 0, then those of pack 1, ...; servers x servers at most */
    int32_t *first_overlap; /* by pack, and the end */
    int32_t *left;        /* by server */
} MatchRoom;

/* Lists the servers of each expert, and the experts of each pack of a compact placement. */
static void
list_both(ptrdiff_t servers, ptrdiff_t experts, const int64_t *count, const int32_t *server, const uint8_t *current,
          MatchRoom *room)
{
    memset(room->first, 0, (size_t)(experts + 1) * sizeof(*room->first));
    memset(room->first_pack, 0, (size_t)(servers + 1) * sizeof(*room->first_pack));
    const HeldList *held = &room->held;
    list_held(current, servers, experts, &room->held);
    for (int32_t i = 0; i < held->first[servers]; i++) {
        room->first[held->expert[i]]++;
    }
    ptrdiff_t replicas = 0;
    for (ptrdiff_t e = 0; e < experts; e++) {
        room->first[e + 1] += room->first[e];
        for (int64_t i = 0; i < count[e]; i++, replicas++) {
            if (server[replicas] >= 0) {
                room->first_pack[server[replicas]]++;
            }
        }
    }
    for (ptrdiff_t s = 0; s < servers; s++) {
        room->first_pack[s + 1] += room->first_pack[s];
    }
    /* Fills from the ends, which thereby become beginnings. */
    for (ptrdiff_t s = servers; s-- > 0;) {
        for (int32_t i = held->first[s]; i < held->first[s + 1]; i++) {
            room->holder[--room->first[held->expert[i]]] = (int32_t)s;
        }
    }
    for (ptrdiff_t e = experts; e-- > 0;) {
        for (int64_t i = count[e]; i-- > 0;) {
            int32_t pack = server[--replicas];
            if (pack >= 0) {
                room->packed[--room->first_pack[pack]] = (int32_t)e;
            }
        }
    }
}

/* Most pairs of a pack and a server have no expert in common: those are left out. */
static void
find_overlaps(ptrdiff_t servers, ptrdiff_t experts, const int64_t *count, const int32_t *server,
              const uint8_t *current, MatchRoom *room)
{
    int32_t found = 0;
    list_both(servers, experts, count, server, current, room);
    memset(room->common, 0, (size_t)servers * sizeof(*room->common));
    for (ptrdiff_t pack = 0; pack < servers; pack++) {
        int32_t begin = found;
        room->first_overlap[pack] = begin;
        for (int32_t i = room->first_pack[pack]; i < room->first_pack[pack + 1]; i++) {
            int32_t e = room->packed[i];
            for (int32_t h = room->first[e]; h < room->first[e + 1]; h++) {
                int32_t s = room->holder[h];
                if (room->common[s]++ == 0) {
                    room->overlap[found++].server = s;
                }
            }
        }
        for (int32_t i = begin; i < found; i++) {
            room->overlap[i].common = room->common[room->overlap[i].server];
            room->common[room->overlap[i].server] = 0;
        }
    }
    room->first_overlap[servers] = found;
}

/* The first free server with this overlap with a pack. */
static int32_t
first_free(ptrdiff_t pack, int32_t common, const int64_t *kind, const uint8_t *taken, const MatchRoom *room)
{
    int32_t best = -1;
    for (int32_t i = room->first_overlap[pack]; i < room->first_overlap[pack + 1]; i++) {
        int32_t s = room->overlap[i].server;
        if (room->overlap[i].common == common && !taken[s] && kind[s] == kind[pack] && (best < 0 || s < best)) {
            best = s;
        }
    }
    return best;
}

/* Matches only packs and servers of one `kind`. Greatest overlap first; ties by pack, then by server; packs without
 * overlap with a free server last. */
static void
match_greedy(ptrdiff_t servers, const int64_t *kind, int64_t *server_of, MatchRoom *room)
{
    uint8_t *taken = (uint8_t *)room->common;
    int32_t most = 0, left = 0;
    memset(taken, 0, (size_t)servers);
    for (int32_t i = 0; i < room->first_overlap[servers]; i++) {
        most = room->overlap[i].common > most ? room->overlap[i].common : most;
    }
    for (ptrdiff_t pack = 0; pack < servers; pack++) {
        server_of[pack] = -1;
    }
    for (int32_t common = most; common > 0; common--) {
        for (ptrdiff_t pack = 0; pack < servers; pack++) {
            int32_t s = server_of[pack] < 0 ? first_free(pack, common, kind, taken, room) : -1;
            if (s >= 0) {
                server_of[pack] = s;
                taken[s] = 1;
            }
        }
    }
    for (ptrdiff_t s = 0; s < servers; s++) {
        if (!taken[s]) {
            room->left[left++] = (int32_t)s;
        }
    }
    for (ptrdiff_t pack = 0; pack < servers; pack++) {
        for (int32_t i = 0; i < left && server_of[pack] < 0; i++) {
            if (kind[room->left[i]] == kind[pack]) {
                server_of[pack] = room->left[i];
                memmove(room->left + i, room->left + i + 1, (size_t)(--left - i) * sizeof(*room->left));
            }
        }
    }
}

/* The same with the greatest sum of overlaps: the Hungarian method, by shortest augmenting paths with potentials
 * (Jonker and Volgenant 1987), O(servers^3). Room: overlaps of servers x servers, 3 x (servers + 1) doubles and as many
 * integers. */
static void
match_optimal(ptrdiff_t servers, const int64_t *kind, int64_t *server_of, const MatchRoom *room, int32_t *overlap,
              double *doubles, int64_t *ints)
{
    const double never = 1e9;
    ptrdiff_t n = servers;
    double *of_pack = doubles, *of_server = of_pack + n + 1, *slack = of_server + n + 1;
    int64_t *pack_at = ints, *way = pack_at + n + 1, *seen = way + n + 1;
    memset(overlap, 0, (size_t)(n * n) * sizeof(*overlap));
    for (ptrdiff_t pack = 0; pack < n; pack++) {
        for (int32_t i = room->first_overlap[pack]; i < room->first_overlap[pack + 1]; i++) {
            overlap[pack * n + room->overlap[i].server] = room->overlap[i].common;
        }
    }
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

/* Which server (L, S) gets the experts that a compact placement has on its server s, from what servers hold now
 * (L, S, E). Only servers of one kind (L, S) change places. */
EXPORT int
match_layers(const int64_t *count_LE, const int32_t *server, const uint8_t *current_LSE, const int64_t *kind_LS,
             bool optimal, int64_t *server_of, ptrdiff_t layers, ptrdiff_t servers, ptrdiff_t experts,
             ptrdiff_t replicas)
{
    if (!list_fits(servers, experts) || !list_fits(servers, servers)) {
        return TOO_MANY;
    }
    if (!counts_fit(count_LE, layers, experts, replicas) || !servers_fit(server, layers * replicas, servers)) {
        return OUT_OF_RANGE;
    }
    size_t s = (size_t)servers, e = (size_t)experts, cells = s * s, whole = optimal ? cells : 0;
    size_t paths = optimal ? 3 * (s + 1) : 0;
    double *doubles = malloc(paths * (sizeof(double) + sizeof(int64_t)) + cells * sizeof(Overlap)
                             + (whole + s * e + e + (size_t)replicas + 4 * s + 3) * sizeof(int32_t)
                             + list_bytes(servers, experts));
    if (doubles == NULL) {
        return NO_MEMORY;
    }
    int64_t *ints = (int64_t *)(doubles + paths);
    MatchRoom room = {.overlap = (Overlap *)(ints + paths)};
    room.holder = (int32_t *)(room.overlap + cells);
    room.first = room.holder + s * e;
    room.packed = room.first + e + 1;
    room.first_pack = room.packed + replicas;
    room.first_overlap = room.first_pack + s + 1;
    room.common = room.first_overlap + s + 1;
    room.left = room.common + s;
    int32_t *overlap = room.left + s;
    room.held = list_in(overlap + whole, servers);
    for (ptrdiff_t l = 0; l < layers; l++) {
        const int64_t *kind = kind_LS + l * servers;
        find_overlaps(servers, experts, count_LE + l * experts, server + l * replicas,
                      current_LSE + l * servers * experts, &room);
        if (optimal) {
            match_optimal(servers, kind, server_of + l * servers, &room, overlap, doubles, ints);
        } else {
            match_greedy(servers, kind, server_of + l * servers, &room);
        }
    }
    free(doubles);
    return DONE;
}
