#include "layer.h"

#include <math.h>
#include <string.h>

/* A stage aims at the excess above this part of the way from the mean to the present peak; where that does not pay, at
 * what is close to the peak alone. */
static const double AIMS[] = {0.5, 0.85};
#define EXACT 1e-9
#define TRIES 3     /* servers without an expert for them before two experts change places */
#define STALE 0.1   /* part of an exchange's gain that may be gone since the round began */
#define SETBACKS 3  /* exchanges of a stage that may fail to lower the excess */
#define WORTH 1e-3  /* of the excess, the least that an exchange is made for */

/* The state of a stage; with it the loads are comparable between scenarios: `weight_B` is 1 over a scenario's total. */
typedef struct {
    Layer *layer;
    double *weight_B, *mean_B, *par_B, *excess_B;
    double *bound_EB;    /* load of experts that no server with room holds */
    double *net_N;       /* what an exchange in a slot would take off the excess, by the round's beginning */
    int32_t *heap;       /* slots with a gain, the greatest first */
    int32_t heap_count;
    double *most_B;      /* scratch */
    int32_t *bound_list; /* experts with such a load */
    int32_t bound_count;
    double *saved_BN, *saved_BS;
    int32_t *saved_N;    /* experts */
    int32_t *before_N;   /* experts before all */
    double excess;       /* over all scenarios, weighted */
    int64_t exchanges;   /* in this stage */
    int64_t abroad;
} Search;

/* ---- what there is ------------------------------------------------------------------------------------------ */

/* The mean PAR with the best flow of each scenario. */
static double
measure(Search *search)
{
    Layer *layer = search->layer;
    double sum = 0, count = 0;
    for (int32_t b = 0; b < layer->scenarios; b++) {
        search->par_B[b] = 1;
        if (search->mean_B[b] > 0) {
            search->par_B[b] = flow_level(&layer->flow_B[b], EXACT, false) / search->mean_B[b];
            sum += search->par_B[b];
            count++;
        }
    }
    return count > 0 ? sum / count : 1;
}

/* Replicas that are not where they were before all. */
static int64_t
count_loads(const Search *search)
{
    const Flow *flow = &search->layer->flow_B[0];
    int64_t loads = 0;
    for (int32_t n = 0; n < flow->slots; n++) {
        loads += flow->expert_N[n] != NONE && flow->expert_N[n] != search->before_N[n];
    }
    return loads;
}

static void
save(Search *search)
{
    Layer *layer = search->layer;
    size_t slots = (size_t)layer->flow_B[0].slots, servers = (size_t)layer->servers;
    memcpy(search->saved_N, layer->flow_B[0].expert_N, slots * sizeof(int32_t));
    for (int32_t b = 0; b < layer->scenarios; b++) {
        memcpy(search->saved_BN + (size_t)b * slots, layer->flow_B[b].flow_N, slots * sizeof(double));
        memcpy(search->saved_BS + (size_t)b * servers, layer->flow_B[b].load_S, servers * sizeof(double));
    }
}

static void
restore(Search *search)
{
    Layer *layer = search->layer;
    size_t slots = (size_t)layer->flow_B[0].slots, servers = (size_t)layer->servers;
    for (int32_t b = 0; b < layer->scenarios; b++) {
        Flow *flow = &layer->flow_B[b];
        for (int32_t e = 0; e < layer->experts; e++) {
            flow->head_E[e] = NONE;
        }
        for (int32_t n = 0; n < flow->slots; n++) {
            flow->expert_N[n] = NONE;
            if (search->saved_N[n] != NONE) {
                flow_put(flow, n, search->saved_N[n]);
            }
        }
        memcpy(flow->flow_N, search->saved_BN + (size_t)b * slots, slots * sizeof(double));
        memcpy(flow->load_S, search->saved_BS + (size_t)b * servers, servers * sizeof(double));
    }
}

/* Shifts what can be shifted, and finds what cannot. */
static void
push(Search *search, double aim)
{
    Layer *layer = search->layer;
    search->excess = 0;
    for (int32_t b = 0; b < layer->scenarios; b++) {
        double level = search->mean_B[b] * (1 + (search->par_B[b] - 1) * aim);
        search->excess_B[b] = search->mean_B[b] > 0 ? flow_push(&layer->flow_B[b], level, EXACT) : 0;
        search->excess += search->excess_B[b] * search->weight_B[b];
    }
}

static void
find_bound(Search *search)
{
    Layer *layer = search->layer;
    size_t scenarios = (size_t)layer->scenarios;
    memset(search->bound_EB, 0, scenarios * (size_t)layer->experts * sizeof(double));
    for (size_t b = 0; b < scenarios; b++) {
        const Flow *flow = &layer->flow_B[b];
        for (int32_t s = 0; search->excess_B[b] > 0 && s < layer->servers; s++) {
            for (int32_t n = flow->first_S[s]; flow->level_S[s] != NONE && n < flow->first_S[s + 1]; n++) {
                if (flow->expert_N[n] != NONE) {
                    search->bound_EB[(size_t)flow->expert_N[n] * scenarios + b] += flow->flow_N[n];
                }
            }
        }
    }
    search->bound_count = 0;
    for (int32_t e = 0; e < layer->experts; e++) {
        double sum = 0;
        for (size_t b = 0; b < scenarios; b++) {
            sum += search->bound_EB[(size_t)e * scenarios + b];
        }
        if (sum > 0) {
            search->bound_list[search->bound_count++] = e;
        }
    }
}

/* ---- one more replica, in the place of one that can be spared ------------------------------------------------ */

/* What of a slot's flow the other replicas of its expert have no room for. */
static double
loss_of(const Search *search, int32_t slot)
{
    const Layer *layer = search->layer;
    double loss = 0;
    for (int32_t b = 0; b < layer->scenarios; b++) {
        const Flow *flow = &layer->flow_B[b];
        double left = flow->flow_N[slot];
        for (int32_t n = flow->head_E[flow->expert_N[slot]]; left > 0 && n != NONE; n = flow->next_N[n]) {
            double room = flow->room_S[flow->server_N[n]];
            left -= n != slot && room > 0 ? room : 0;
        }
        loss += left > 0 ? left * search->weight_B[b] : 0;
    }
    return loss;
}

/* What of each scenario's excess a slot's server could take in the place of the slot's flow: into most_B. Returns the
 * weighted sum. */
static double
relief_of(const Search *search, int32_t server, int32_t slot)
{
    const Layer *layer = search->layer;
    double relief = 0;
    for (int32_t b = 0; b < layer->scenarios; b++) {
        const Flow *flow = &layer->flow_B[b];
        double most = 0;
        if (search->excess_B[b] > 0 && flow->level_S[server] == NONE) {
            most = flow->room_S[server] + (flow->expert_N[slot] == NONE ? 0 : flow->flow_N[slot]);
            most = most < search->excess_B[b] ? most : search->excess_B[b];
            most = most > 0 ? most : 0;
        }
        search->most_B[b] = most;
        relief += most * search->weight_B[b];
    }
    return relief;
}

/* Relief less loss; 0 for the only replica of an expert. */
static double
net_of(const Search *search, int32_t slot)
{
    const Flow *flow = &search->layer->flow_B[0];
    int32_t e = flow->expert_N[slot];
    if (e != NONE && flow->next_N[flow->head_E[e]] == NONE) {
        return 0;
    }
    double relief = relief_of(search, flow->server_N[slot], slot);
    return relief > 0 ? relief - (e == NONE ? 0 : loss_of(search, slot)) : 0;
}

static void
sift_down(Search *search, int32_t at)
{
    const double *net_N = search->net_N;
    int32_t *heap = search->heap, slot = heap[at];
    for (;;) {
        int32_t child = 2 * at + 1;
        if (child >= search->heap_count) {
            break;
        }
        if (child + 1 < search->heap_count && net_N[heap[child + 1]] > net_N[heap[child]]) {
            child++;
        }
        if (!(net_N[heap[child]] > net_N[slot])) {
            break;
        }
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = slot;
}

static void
find_places(Search *search)
{
    search->heap_count = 0;
    for (int32_t n = 0; n < search->layer->flow_B[0].slots; n++) {
        search->net_N[n] = net_of(search, n);
        if (search->net_N[n] > 0) {
            search->heap[search->heap_count++] = n;
        }
    }
    for (int32_t i = search->heap_count / 2 - 1; i >= 0; i--) {
        sift_down(search, i);
    }
}

/* The slot with the most to gain, or NONE. What was found at the beginning of a round only gets less. */
static int32_t
best_slot(Search *search)
{
    while (search->heap_count > 0) {
        int32_t slot = search->heap[0];
        double before = search->net_N[slot], now = before > 0 ? net_of(search, slot) : 0;
        if (now > 0 && now >= before * (1 - STALE)) {
            return slot;
        }
        search->net_N[slot] = now;
        if (!(now > 0)) {
            search->heap[0] = search->heap[--search->heap_count];
        }
        if (search->heap_count > 0) {
            sift_down(search, 0);
        }
    }
    return NONE;
}

/* How many more replicas would be abroad if the slot had another expert. */
static int64_t
more_abroad(Layer *layer, int32_t server, int32_t slot, int32_t expert)
{
    if (layer->node_S == NULL) {
        return 0;
    }
    int32_t old = layer->flow_B[0].expert_N[slot];
    int64_t more = !is_near(layer, server, expert);
    if (old != NONE) {
        Flow *flow = &layer->flow_B[0];
        double kept = flow->flow_N[slot];
        more -= count_abroad(layer, old);
        flow_take(flow, slot);
        more += count_abroad(layer, old);
        flow_put(flow, slot, old);
        flow->flow_N[slot] = kept;
    }
    return more;
}

/* The expert with the most to put there; most_B is the slot's. */
static int32_t
best_expert(const Search *search, int32_t slot)
{
    Layer *layer = search->layer;
    const Flow *flow = &layer->flow_B[0];
    int32_t server = flow->server_N[slot], best = NONE;
    double best_gain = WORTH * search->excess + (flow->expert_N[slot] == NONE ? 0 : loss_of(search, slot));
    for (int32_t i = 0; i < search->bound_count; i++) {
        int32_t e = search->bound_list[i];
        const double *bound_B = search->bound_EB + (size_t)e * (size_t)layer->scenarios;
        double gain = 0;
        for (int32_t b = 0; b < layer->scenarios; b++) {
            double most = search->most_B[b] < bound_B[b] ? search->most_B[b] : bound_B[b];
            /* Of equal ones the hottest: there is the most to shift later. */
            gain += (most + 1e-6 * bound_B[b]) * search->weight_B[b];
        }
        if (gain > best_gain && !holds(flow, server, e) &&
            search->abroad + more_abroad(layer, server, slot, e) <= layer->most_abroad) {
            best_gain = gain;
            best = e;
        }
    }
    return best;
}

/* The other replicas take over a slot's flow: where there is room, and the first of them what is left. */
static void
hand_over(Flow *flow, int32_t slot)
{
    int32_t expert = flow->expert_N[slot];
    double left = flow->flow_N[slot];
    flow->load_S[flow->server_N[slot]] -= left;
    flow->room_S[flow->server_N[slot]] += left;
    flow_take(flow, slot);
    for (int32_t n = flow->head_E[expert]; n != NONE; n = flow->next_N[n]) {
        double room = flow->room_S[flow->server_N[n]];
        double given = room < left ? (room > 0 ? room : 0) : left;
        flow->flow_N[n] += given;
        flow->load_S[flow->server_N[n]] += given;
        flow->room_S[flow->server_N[n]] -= given;
        left -= given;
    }
    flow->flow_N[flow->head_E[expert]] += left;
    flow->load_S[flow->server_N[flow->head_E[expert]]] += left;
}

/* What a new replica is expected to take: it is not to be given away twice in a round. */
static void
book(Search *search, int32_t b, int32_t server, int32_t expert)
{
    Flow *flow = &search->layer->flow_B[b];
    double *bound = &search->bound_EB[(size_t)expert * (size_t)search->layer->scenarios + (size_t)b];
    if (!(search->excess_B[b] > 0) || flow->level_S[server] != NONE) {
        return;
    }
    double taken = flow->room_S[server] < *bound ? flow->room_S[server] : *bound;
    taken = taken < search->excess_B[b] ? taken : search->excess_B[b];
    if (taken > 0) {
        flow->room_S[server] -= taken;
        search->excess_B[b] -= taken;
        search->excess -= taken * search->weight_B[b];
        *bound -= taken;
    }
}

static bool
replicate_one(Search *search)
{
    Layer *layer = search->layer;
    const Flow *flow = &layer->flow_B[0];
    for (int32_t tries = 0; tries < TRIES; tries++) {
        int32_t slot = best_slot(search);
        if (slot == NONE) {
            return false;
        }
        int32_t server = flow->server_N[slot];
        relief_of(search, server, slot);
        int32_t expert = best_expert(search, slot);
        /* Once in a round: its other slots' gains are other ones then. */
        for (int32_t n = flow->first_S[server]; n < flow->first_S[server + 1]; n++) {
            search->net_N[n] = 0;
        }
        if (expert == NONE) {
            continue;
        }
        search->abroad += more_abroad(layer, server, slot, expert);
        for (int32_t b = 0; b < layer->scenarios; b++) {
            if (layer->flow_B[b].expert_N[slot] != NONE) {
                hand_over(&layer->flow_B[b], slot);
            }
            flow_put(&layer->flow_B[b], slot, expert);
            book(search, b, server, expert);
        }
        search->exchanges++;
        return true;
    }
    return false;
}

/* ---- two experts change places -------------------------------------------------------------------------------- */

static int32_t
fullest(const Search *search)
{
    const Layer *layer = search->layer;
    int32_t worst = NONE;
    double worst_excess = 0;
    for (int32_t s = 0; s < layer->servers; s++) {
        double excess = 0;
        for (int32_t b = 0; b < layer->scenarios; b++) {
            const Flow *flow = &layer->flow_B[b];
            if (search->excess_B[b] > 0 && flow->level_S[s] == 0) {
                excess -= flow->room_S[s] * search->weight_B[b];
            }
        }
        if (excess > worst_excess) {
            worst_excess = excess;
            worst = s;
        }
    }
    return worst;
}

/* The change of the excess if the flows of two slots (NONE: of an empty one) changed places. */
static double
gain_of_swap(const Search *search, int32_t from, int32_t to)
{
    const Layer *layer = search->layer;
    double gain = 0;
    for (int32_t b = 0; b < layer->scenarios; b++) {
        const Flow *flow = &layer->flow_B[b];
        if (!(search->mean_B[b] > 0)) {
            continue;
        }
        double shift = flow->flow_N[from] - (flow->expert_N[to] == NONE ? 0 : flow->flow_N[to]);
        double over = -flow->room_S[flow->server_N[from]], room = flow->room_S[flow->server_N[to]];
        double before = (over > 0 ? over : 0) + (room < 0 ? -room : 0);
        double after = (over - shift > 0 ? over - shift : 0) + (shift - room > 0 ? shift - room : 0);
        gain += (before - after) * search->weight_B[b];
    }
    return gain;
}

static bool
swap_one(Search *search)
{
    Layer *layer = search->layer;
    const Flow *flow = &layer->flow_B[0];
    int32_t source = fullest(search), best_from = NONE, best_to = NONE;
    double best_gain = WORTH * search->excess;
    if (source == NONE) {
        return false;
    }
    for (int32_t to = 0; to < flow->slots; to++) {
        int32_t target = flow->server_N[to], other = flow->expert_N[to];
        if (target == source || (other != NONE && holds(flow, source, other))) {
            continue;
        }
        for (int32_t from = flow->first_S[source]; from < flow->first_S[source + 1]; from++) {
            int32_t expert = flow->expert_N[from];
            if (expert == NONE) {
                continue;
            }
            double gain = gain_of_swap(search, from, to);
            if (gain > best_gain && !holds(flow, target, expert) &&
                (layer->node_S == NULL || layer->node_S[source] == layer->node_S[target])) {
                best_gain = gain;
                best_from = from;
                best_to = to;
            }
        }
    }
    if (best_from == NONE) {
        return false;
    }
    for (int32_t b = 0; b < layer->scenarios; b++) {
        Flow *each = &layer->flow_B[b];
        int32_t expert = each->expert_N[best_from], other = each->expert_N[best_to];
        double flow_there = other == NONE ? 0 : each->flow_N[best_to], flow_here = each->flow_N[best_from];
        flow_take(each, best_from);
        if (other != NONE) {
            flow_take(each, best_to);
            flow_put(each, best_from, other);
            each->flow_N[best_from] = flow_there;
        }
        flow_put(each, best_to, expert);
        each->flow_N[best_to] = flow_here;
        each->load_S[source] += flow_there - flow_here;
        each->load_S[each->server_N[best_to]] += flow_here - flow_there;
    }
    search->exchanges++;
    return true;
}

/* ---- stages ---------------------------------------------------------------------------------------------------- */

/* Exchanges until nothing is above the aim, or until it is clear that this would not pay: a stage cannot lower the PAR
 * by more than `most`. Returns how many replicas more have to be loaded. */
static int64_t
run_stage(Search *search, double aim, double most)
{
    double price = search->layer->price, first;
    int64_t before_all = count_loads(search);
    int32_t setbacks = 0;
    /* Load is shifted anew after a round of exchanges only: it is what takes the time. */
    int32_t round = 4 + search->layer->servers / 8;
    search->exchanges = 0;
    push(search, aim);
    first = search->excess;
    while (search->excess > EXACT && setbacks < SETBACKS && search->exchanges < search->layer->flow_B[0].slots) {
        double before = search->excess;
        int64_t exchanges = search->exchanges;
        find_bound(search);
        find_places(search);
        for (int32_t i = 0; i < round && search->excess > EXACT && replicate_one(search); i++) {
        }
        if (search->exchanges == exchanges && !swap_one(search)) {
            break;
        }
        push(search, aim);
        setbacks += !(search->excess < before * (1 - WORTH));
        /* At this pace. */
        double done = first > search->excess ? 1 - search->excess / first : 0;
        if (price * (double)(count_loads(search) - before_all) > most * (done < 0.25 ? 0.5 : 2 * done)) {
            break;
        }
    }
    return count_loads(search) - before_all;
}

static void
start_flows(Search *search)
{
    Layer *layer = search->layer;
    Flow *first = &layer->flow_B[0];
    /* The first one has the shares, in any unit; it is the last to be overwritten. */
    for (int32_t e = 0; e < layer->experts; e++) {
        double sum = 0;
        for (int32_t n = first->head_E[e]; n != NONE; n = first->next_N[n]) {
            sum += first->flow_N[n];
        }
        double even = 1.0 / replicas(first, e);
        for (int32_t n = first->head_E[e]; n != NONE; n = first->next_N[n]) {
            double share = sum > 0 ? first->flow_N[n] / sum : even;
            for (int32_t b = layer->scenarios - 1; b >= 0; b--) {
                layer->flow_B[b].flow_N[n] = share * layer->load_BE[(size_t)b * (size_t)layer->experts + (size_t)e];
            }
        }
        search->abroad += count_abroad(layer, e);
    }
    double speed = 0;
    for (int32_t s = 0; s < layer->servers; s++) {
        speed += layer->speed_S[s];
    }
    for (int32_t b = 0; b < layer->scenarios; b++) {
        Flow *flow = &layer->flow_B[b];
        double total = 0;
        for (int32_t s = 0; s < layer->servers; s++) {
            flow->load_S[s] = 0;
            for (int32_t n = flow->first_S[s]; n < flow->first_S[s + 1]; n++) {
                flow->load_S[s] += flow->expert_N[n] == NONE ? 0 : flow->flow_N[n];
            }
            total += flow->load_S[s];
        }
        search->mean_B[b] = total / speed;
        search->weight_B[b] = total > 0 ? 1 / total : 0;
    }
}

double
improve(Layer *layer)
{
    size_t scenarios = (size_t)layer->scenarios, slots = (size_t)layer->flow_B[0].slots;
    double *doubles = layer->scratch;
    Search search = {.layer = layer, .saved_N = layer->counts};
    search.weight_B = doubles;
    search.mean_B = search.weight_B + scenarios;
    search.par_B = search.mean_B + scenarios;
    search.excess_B = search.par_B + scenarios;
    search.most_B = search.excess_B + scenarios;
    search.net_N = search.most_B + scenarios;
    search.bound_EB = search.net_N + slots;
    search.saved_BN = search.bound_EB + scenarios * (size_t)layer->experts;
    search.saved_BS = search.saved_BN + scenarios * slots;
    search.before_N = search.saved_N + slots;
    search.heap = search.before_N + slots;
    search.bound_list = search.heap + slots;
    memcpy(search.before_N, layer->flow_B[0].expert_N, slots * sizeof(int32_t));
    start_flows(&search);
    double par = measure(&search);
    size_t aim = 0;
    while (aim < sizeof(AIMS) / sizeof(AIMS[0]) && par - 1 > layer->price + EXACT) {
        int64_t abroad = search.abroad;
        save(&search);
        int64_t loads = run_stage(&search, AIMS[aim], (par - 1) * (1 - AIMS[aim]));
        double now = search.exchanges > 0 ? measure(&search) : par;
        if (par - now > layer->price * (double)loads + EXACT) {
            par = now;
            aim = 0;
            continue;
        }
        restore(&search);
        measure(&search);
        search.abroad = abroad;
        aim++;
    }
    return par;
}
