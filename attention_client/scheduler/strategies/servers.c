/* Choices by the time of the expert servers: see select.h. */
#include "rows.h"
#include "select.h"

/* exp(-x) for x >= 0, within 1e-6, without a call, so that the compiler can vectorise loops. */
static inline float
decay(float x)
{
    float y = x * 1.44269504f; /* 2^-y */
    y = y < 125.0f ? y : 125.0f;
    int32_t whole = (int32_t)y;
    float f = ((float)whole - y) * 0.693147181f; /* exp(f), f in (-0.7, 0] */
    float series = 1.0f + f * (1.0f + f * (0.5f + f * (1.0f / 6 + f * (1.0f / 24 + f * (1.0f / 120 + f * (1.0f / 720))))));
    union {
        int32_t bits;
        float value;
    } power = {.bits = (127 - whole) << 23};
    return series * power.value;
}

/* Time of a server: it reads the weights of its active experts and computes its pairs. */
static inline float
server_time(const Servers *servers, float active, float pairs)
{
    float weights_s = (float)servers->load_s * active, compute_s = (float)servers->pair_s * pairs;
    return weights_s > compute_s ? weights_s : compute_s;
}

/* Requests and the batch, folded through the placement: each replica's probability to get no pair (Poisson), and each
 * server's pairs. A request is a column. */
typedef struct {
    ptrdiff_t columns, stride; /* in use, and of a row */
    float *idle_RW, *pairs_SW; /* of each request */
    float *idle_R, *pairs_S;   /* of the batch so far */
    float *score_W;
} Folded;

/* load_EW is transposed. */
static void
fold(const Servers *servers, const float *load_EW, ptrdiff_t stride, float *idle_RW, float *pairs_SW)
{
    for (ptrdiff_t s = 0; s < servers->servers; s++) {
        float *restrict pairs_W = pairs_SW + s * stride;
        memset(pairs_W, 0, (size_t)stride * sizeof(float));
        for (int64_t r = servers->first_S[s]; r < servers->first_S[s + 1]; r++) {
            const float *restrict load_W = load_EW + servers->expert_R[r] * stride;
            float *restrict idle_W = idle_RW + r * stride, share = (float)servers->share_R[r];
            for (ptrdiff_t w = 0; w < stride; w++) {
                float pairs = share * load_W[w];
                pairs_W[w] += pairs;
                idle_W[w] = decay(pairs);
            }
        }
    }
}

static Folded
fold_window(const double *window_WE, ptrdiff_t window, ptrdiff_t experts, const Servers *servers, float *scratch)
{
    ptrdiff_t stride = folded_stride(window);
    float *load_EW = scratch;
    Folded folded = {.columns = window, .stride = stride, .idle_RW = load_EW + experts * stride};
    folded.pairs_SW = folded.idle_RW + servers->replicas * stride;
    folded.score_W = folded.pairs_SW + servers->servers * stride;
    folded.idle_R = folded.score_W + stride;
    folded.pairs_S = folded.idle_R + servers->replicas;
    for (ptrdiff_t begin = 0; begin < stride; begin += FOLDED_BLOCK) {
        for (ptrdiff_t e = 0; e < experts; e++) {
            for (ptrdiff_t w = begin; w < begin + FOLDED_BLOCK; w++) {
                load_EW[e * stride + w] = w < window ? (float)window_WE[w * experts + e] : 0;
            }
        }
    }
    fold(servers, load_EW, stride, folded.idle_RW, folded.pairs_SW);
    return folded;
}

static void
clear_batch(const Servers *servers, const Folded *folded)
{
    memset(folded->pairs_S, 0, (size_t)servers->servers * sizeof(float));
    for (ptrdiff_t r = 0; r < servers->replicas; r++) {
        folded->idle_R[r] = 1;
    }
}

static void
add_request(const Servers *servers, const Folded *folded, ptrdiff_t column)
{
    for (ptrdiff_t s = 0; s < servers->servers; s++) {
        folded->pairs_S[s] += folded->pairs_SW[s * folded->stride + column];
    }
    for (ptrdiff_t r = 0; r < servers->replicas; r++) {
        folded->idle_R[r] *= folded->idle_RW[r * folded->stride + column];
    }
}

/* Scores of a block of requests: over the layers, the largest plus the mean time of a server. The largest alone would
 * ignore what is added to other servers. */
static void
score_block(const Servers *servers, const Folded *folded, ptrdiff_t begin)
{
    ptrdiff_t of_layer = servers->servers / servers->layers;
    float score[FOLDED_BLOCK] = {0};
    for (ptrdiff_t s = 0; s < servers->servers;) {
        float slowest[FOLDED_BLOCK] = {0};
        for (ptrdiff_t end = s + of_layer; s < end; s++) {
            int64_t first = servers->first_S[s], after = servers->first_S[s + 1];
            float idle[FOLDED_BLOCK] = {0};
            for (int64_t r = first; r < after; r++) {
                const float *idle_W = folded->idle_RW + r * folded->stride + begin;
                float batch = folded->idle_R[r];
                for (ptrdiff_t c = 0; c < FOLDED_BLOCK; c++) {
                    idle[c] += batch * idle_W[c];
                }
            }
            const float *pairs_W = folded->pairs_SW + s * folded->stride + begin;
            for (ptrdiff_t c = 0; c < FOLDED_BLOCK; c++) {
                float time_s = server_time(servers, (float)(after - first) - idle[c], folded->pairs_S[s] + pairs_W[c]);
                slowest[c] = time_s > slowest[c] ? time_s : slowest[c];
                score[c] += time_s / (float)of_layer;
            }
        }
        for (ptrdiff_t c = 0; c < FOLDED_BLOCK; c++) {
            score[c] += slowest[c];
        }
    }
    memcpy(folded->score_W + begin, score, sizeof score);
}

/* Moves the best of the remaining requests to the batch; of equals the older one. */
static int64_t
add_best(const Servers *servers, const Folded *folded, int64_t *left, ptrdiff_t *count)
{
    for (ptrdiff_t begin = 0; begin < folded->columns; begin += FOLDED_BLOCK) {
        score_block(servers, folded, begin);
    }
    ptrdiff_t best = 0;
    for (ptrdiff_t i = 1; i < *count; i++) {
        if (folded->score_W[left[i]] < folded->score_W[left[best]]) {
            best = i;
        }
    }
    int64_t column = left[best];
    add_request(servers, folded, column);
    take_out(left, (*count)--, best);
    return column;
}

void
choose_for_servers(const double *window_WE, ptrdiff_t window, ptrdiff_t experts, const Servers *servers,
                   const double *load_E, float *scratch, int64_t *left, int64_t *chosen, ptrdiff_t have, ptrdiff_t take)
{
    if (have == take) {
        return;
    }
    Folded folded = fold_window(window_WE, window, experts, servers, scratch);
    for (ptrdiff_t e = 0; e < experts; e++) {
        scratch[e] = (float)load_E[e]; /* reuses the window's loads, which are folded */
    }
    fold(servers, scratch, 1, folded.idle_R, folded.pairs_S);
    for (ptrdiff_t c = 0; c < have; c++) {
        add_request(servers, &folded, chosen[c]);
    }
    ptrdiff_t count = list_left(left, window, chosen, have);
    for (; have < take; have++) {
        chosen[have] = add_best(servers, &folded, left, &count);
    }
}

/* Time of the batch so far. */
static double
batch_time(const Servers *servers, const Folded *folded)
{
    ptrdiff_t of_layer = servers->servers / servers->layers;
    double all_slowest = 0;
    for (ptrdiff_t s = 0; s < servers->servers;) {
        float slowest = 0;
        for (ptrdiff_t end = s + of_layer; s < end; s++) {
            float active = 0;
            for (int64_t r = servers->first_S[s]; r < servers->first_S[s + 1]; r++) {
                active += 1 - folded->idle_R[r];
            }
            float time_s = server_time(servers, active, folded->pairs_S[s]);
            slowest = time_s > slowest ? time_s : slowest;
        }
        all_slowest += (double)slowest;
    }
    return all_slowest;
}

/* Keeps only the remaining requests, in the first columns. */
static void
keep_columns(const Servers *servers, Folded *folded, int64_t *left, ptrdiff_t count)
{
    ptrdiff_t rows = servers->replicas + servers->servers; /* pairs_SW lies behind idle_RW */
    for (ptrdiff_t row = 0; row < rows; row++) {
        float *row_W = folded->idle_RW + row * folded->stride;
        for (ptrdiff_t i = 0; i < count; i++) {
            row_W[i] = row_W[left[i]];
        }
    }
    for (ptrdiff_t i = 0; i < count; i++) {
        left[i] = i;
    }
    folded->columns = count;
}

void
compare_orders(const double *window_WE, ptrdiff_t window, ptrdiff_t experts, const Servers *servers, ptrdiff_t batch,
               float *scratch, int64_t *left, double *by_age, double *by_choice)
{
    Folded folded = fold_window(window_WE, window, experts, servers, scratch);
    *by_age = *by_choice = 0;
    for (ptrdiff_t begin = 0; begin < window; begin += batch) {
        clear_batch(servers, &folded);
        for (ptrdiff_t w = begin; w < begin + batch && w < window; w++) {
            add_request(servers, &folded, w);
        }
        *by_age += batch_time(servers, &folded);
    }
    ptrdiff_t count = list_left(left, window, NULL, 0);
    while (count > 0) {
        clear_batch(servers, &folded);
        add_request(servers, &folded, left[0]);
        take_out(left, count--, 0);
        if (count < batch) { /* all that are left go */
            for (; count > 0; count--) {
                add_request(servers, &folded, left[count - 1]);
            }
        }
        for (ptrdiff_t taken = 1; taken < batch && count > 0; taken++) {
            add_best(servers, &folded, left, &count);
        }
        *by_choice += batch_time(servers, &folded);
        keep_columns(servers, &folded, left, count);
    }
}

double
step_time(const Servers *servers, const double *load_E)
{
    ptrdiff_t of_layer = servers->servers / servers->layers;
    double all_largest = 0;
    for (ptrdiff_t s = 0; s < servers->servers;) {
        double largest = 0;
        for (ptrdiff_t end = s + of_layer; s < end; s++) {
            double pairs = 0, active = 0;
            for (int64_t r = servers->first_S[s]; r < servers->first_S[s + 1]; r++) {
                double here = servers->share_R[r] * load_E[servers->expert_R[r]];
                pairs += here;
                active += 1.0 - (double)decay((float)here);
            }
            double time_s = server_time(servers, active, pairs);
            largest = time_s > largest ? time_s : largest;
        }
        all_largest += largest;
    }
    return all_largest;
}
