/* One MoE layer over the experts held here: group the rows, first product and activation, second product.
 *
 *   group   a row per (token, expert), sorted by expert; experts without rows cost nothing ("group shrink")
 *   gather  copies the rows' hidden states to consecutive memory, in the order of the expert's inputs
 *   up      a task is some panels of one expert: product, activation, into `hidden`
 *   split   for integer products: the values of `hidden` into two bytes each, in place
 *   down    a task is some output channels of ALL experts, ascending: product, times score, added to `out`
 *
 * Each task of the second product owns its part of `out`, so there are no atomics and no buffer of rows. Each token's
 * sum is in ascending order of its experts, independent of the threads and the rest of the batch.
 */
#include "../../../eaas/wire/spin.h"
#include "native.h"

#include <string.h>

/* Rows of a block: its x and c must fit into a core's L2 cache together with the weights. */
#define BLOCK_ROWS 128
/* Panels of a task: few if reading the weights is most of the work, so that there are many even tasks. */
#define NARROW_PANELS 8
#define WIDE_PANELS 16
#define MANY_ROWS 32
#define TASKS_PER_THREAD 4
#define LEAST_TASK_BYTES ((size_t)16 << 10)
/* Weights that are loaded ahead where a thread goes on to others: what arrives while the first of them is awaited. */
#define EXPECTED_BYTES 16384
/* Limit of the gathered rows: larger batches are cut, to bound the scratch memory. */
#define SCRATCH_ROWS_BYTES ((size_t)128 << 20)
/* Rows of a copying task, and of a computing one. */
#define GATHER_TASK_ROWS 64
#define SPLIT_TASK_ROWS 16
/* Rows of an expert from which on its products look ahead: with fewer, they do little else than read. */
#define AHEAD_ROWS 17

static inline size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }
static inline int min_int(int a, int b) { return a < b ? a : b; }

/* Rows are one line longer than necessary: rows a power of two apart would share few cache sets. */
static size_t row_bytes(const GemmKind *kind, int width) {
    return (size_t)padded_k(kind->weights, width) * format_bytes(kind->x) + LINE_BYTES;
}

typedef struct {
    const Moe *moe;
    int panels_up, panels_down, k_up, k_down;
    size_t x_stride, hidden_stride;
    /* This part of the batch. */
    int first_token, tokens, rows, active_count;
    bool is_alone;     /* The calling thread does all tasks. */
    int stride;        /* A thread's next task is probably so many tasks further. */
    int32_t *ids;      /* (T, K) of the whole batch, checked */
    int *active;       /* (E) experts with rows, ascending */
    int *first_row;    /* (E + 1) by place in `active` */
    int *row_token;    /* (N) */
    int *row_expert;   /* (N) */
    float *row_score;  /* (N) */
    int *counts;       /* (E) */
    char *x, *hidden;  /* (N) rows */
    float *sums;       /* BLOCK_ROWS x WIDE_PANELS panels for each thread */
    int up_panels, up_tasks_per_expert, down_panels, down_tasks;
} Layer;

static int tokens_at_once(const GemmKind *kind, int hidden, int intermediate, int tokens, int top_k) {
    size_t per_token = (row_bytes(kind, hidden) + row_bytes(kind, intermediate)) * (size_t)(top_k > 0 ? top_k : 1);
    size_t most = SCRATCH_ROWS_BYTES / per_token;
    if (most < 1) most = 1;
    return (size_t)tokens < most ? tokens : (int)most;
}

/* Lays the arrays out in scratch memory; returns its size. */
static size_t lay_out(Layer *layer, const GemmKind *kind, int threads, int hidden, int intermediate, int tokens,
                      int top_k, int num_experts, char *scratch) {
    size_t rows = (size_t)tokens_at_once(kind, hidden, intermediate, tokens, top_k) * (size_t)top_k, at = 0;
#define TAKE(field, type, bytes)                                                                                   \
    layer->field = (type *)(scratch + at);                                                                         \
    at += round_up(bytes, LINE_BYTES)
    TAKE(x, char, (rows + GEMM_SPARE_ROWS) * row_bytes(kind, hidden));
    TAKE(hidden, char, (rows + GEMM_SPARE_ROWS) * row_bytes(kind, intermediate));
    TAKE(sums, float, (size_t)threads * BLOCK_ROWS * WIDE_PANELS * PANEL * sizeof(float));
    TAKE(active, int, (size_t)num_experts * sizeof(int));
    TAKE(first_row, int, ((size_t)num_experts + 1) * sizeof(int));
    TAKE(counts, int, (size_t)num_experts * sizeof(int));
    TAKE(row_token, int, rows * sizeof(int));
    TAKE(row_expert, int, rows * sizeof(int));
    TAKE(row_score, float, rows * sizeof(float));
    TAKE(ids, int32_t, (size_t)tokens * (size_t)top_k * sizeof(int32_t));
#undef TAKE
    return at;
}

size_t moe_scratch_bytes(const GemmKind *kind, int threads, int hidden, int intermediate, int tokens, int top_k,
                         int num_experts) {
    Layer layer;
    /* Not NULL: arithmetic on a null pointer is undefined. */
    static char nothing;
    return lay_out(&layer, kind, threads, hidden, intermediate, tokens, top_k, num_experts, &nothing);
}

/* Counting sort: an expert's rows are consecutive, in the order of their tokens. */
static void group(Layer *layer) {
    const Moe *moe = layer->moe;
    const size_t begin = (size_t)layer->first_token * moe->top_k, pairs = (size_t)layer->tokens * moe->top_k;
    const int32_t *ids = layer->ids + begin;
    memset(layer->counts, 0, (size_t)moe->num_experts * sizeof(int));
    for (size_t i = 0; i < pairs; i++)
        if (ids[i] >= 0) layer->counts[ids[i]]++;
    layer->active_count = layer->rows = 0;
    for (int expert = 0; expert < moe->num_experts; expert++) {
        const int count = layer->counts[expert];
        layer->counts[expert] = layer->rows; /* From here on: the expert's next row. */
        if (count == 0) continue;
        if (moe->counts != NULL) moe->counts[1 + expert] += count;
        layer->first_row[layer->active_count] = layer->rows;
        layer->active[layer->active_count++] = expert;
        layer->rows += count;
    }
    layer->first_row[layer->active_count] = layer->rows;
    if (moe->counts != NULL) moe->counts[0] += layer->active_count;
    for (size_t i = 0; i < pairs; i++) {
        if (ids[i] < 0) continue;
        const int row = layer->counts[ids[i]]++;
        layer->row_token[row] = layer->first_token + (int)(i / (size_t)moe->top_k);
        layer->row_expert[row] = ids[i];
        layer->row_score[row] = moe->scores[begin + i];
    }
}

static int gather_task_rows(const GemmKind *kind) { return kind->x == SPLIT ? SPLIT_TASK_ROWS : GATHER_TASK_ROWS; }

static void gather(void *context, int task, int thread) {
    (void)thread;
    const Layer *layer = context;
    const Moe *moe = layer->moe;
    const Format format = moe->kind->x == SPLIT ? FLOAT32 : moe->kind->x;
    const size_t value_bytes = format_bytes(format), bytes = (size_t)moe->hidden * value_bytes;
    const size_t from_bytes = (size_t)moe->hidden * format_bytes(moe->x_format);
    /* Bytes of a row that the activation will write. */
    const size_t written = round_up((size_t)moe->intermediate, PANEL) * value_bytes;
    const int task_rows = gather_task_rows(moe->kind), end = min_int((task + 1) * task_rows, layer->rows);
    for (int row = task * task_rows; row < end; row++) {
        char *to = layer->x + (size_t)row * layer->x_stride;
        const char *from = moe->x + (size_t)layer->row_token[row] * from_bytes;
        const int32_t *order = (const int32_t *)moe->experts[layer->row_expert[row]].up_order;
        if (order != NULL)
            reorder_row(from, moe->x_format, order, moe->hidden, format, to);
        else
            convert_row(from, moe->x_format, moe->hidden, format, to);
        if (moe->kind->x == SPLIT) {
            split_row((const float *)to, moe->hidden, moe->kind->weights, to);
            continue;
        }
        /* Zero the padding: stale values may be NaN. */
        memset(to + bytes, 0, (size_t)layer->k_up * value_bytes - bytes);
        memset(layer->hidden + (size_t)row * layer->hidden_stride + written, 0,
               (size_t)layer->k_down * value_bytes - written);
    }
}

static void split(void *context, int task, int thread) {
    (void)thread;
    const Layer *layer = context;
    const int end = min_int((task + 1) * SPLIT_TASK_ROWS, layer->rows);
    for (int row = task * SPLIT_TASK_ROWS; row < end; row++) {
        char *hidden = layer->hidden + (size_t)row * layer->hidden_stride;
        split_row((const float *)hidden, layer->moe->intermediate, layer->moe->kind->weights, hidden);
    }
}

static float *sums_of(const Layer *layer, int thread) {
    return layer->sums + (size_t)thread * BLOCK_ROWS * WIDE_PANELS * PANEL;
}

/* Where the weights of a task of `up` begin. */
static const char *up_weights(const Layer *layer, int task) {
    const Expert *expert = &layer->moe->experts[layer->active[task / layer->up_tasks_per_expert]];
    const int panel = task % layer->up_tasks_per_expert * layer->up_panels;
    return (const char *)expert->up + (size_t)panel * panel_bytes_of(layer->moe->kind->weights, layer->k_up);
}

/* Where the weights of one expert for a task of `down` begin. */
static const char *down_weights(const Layer *layer, int task, int place) {
    const Expert *expert = &layer->moe->experts[layer->active[place]];
    const size_t panel_bytes = panel_bytes_of(layer->moe->kind->weights, layer->k_down);
    return (const char *)expert->down + (size_t)task * layer->down_panels * panel_bytes;
}

/* Loads the beginning of the weights that this thread reads next: products prefetch forward only, and would wait for
 * memory where other weights begin. Into the L2 cache: the L1 cache would lose it before. */
static void expect(const char *weights, size_t bytes) {
    for (size_t i = 0; i < bytes && i < EXPECTED_BYTES; i += LINE_BYTES) __builtin_prefetch(weights + i, 0, 2);
}

/* What a product reads first: it looks ahead for its other panels itself. */
static Region first_panels(const char *weights, int panels, size_t panel_bytes) {
    return (Region){weights, (size_t)min_int(panels, 2) * panel_bytes};
}

/* An expert's rows of `layer->x` or `layer->hidden`. */
static Region rows_of(const Layer *layer, const char *rows, size_t stride, int place) {
    const int first = layer->first_row[place], end = layer->first_row[place + 1];
    return (Region){rows + (size_t)first * stride, (size_t)(end - first) * stride};
}

static bool looks_ahead(const Layer *layer, int place) {
    const int rows = layer->first_row[place + 1] - layer->first_row[place];
    return layer->moe->kind->ahead != NULL && rows >= AHEAD_ROWS;
}

/* The product of a block of rows. `ahead`: of an expert's first block, which reads the weights from memory; the others
 * find them in the cache. NULL: it does not look ahead. */
static void multiply(const GemmKind *kind, const char *x, size_t x_stride, int m, const char *w, size_t panel_bytes,
                     int panels, int k, float *c, const Ahead *ahead) {
    if (ahead != NULL)
        kind->ahead(x, x_stride, m, w, panel_bytes, panels, k, c, (size_t)panels * PANEL, ahead);
    else
        kind->gemm(x, x_stride, m, w, panel_bytes, panels, k, c, (size_t)panels * PANEL);
}

static void up(void *context, int task, int thread) {
    const Layer *layer = context;
    const Moe *moe = layer->moe;
    const GemmKind *kind = moe->kind;
    const int place = task / layer->up_tasks_per_expert;
    const int panel = task % layer->up_tasks_per_expert * layer->up_panels;
    const int panels = min_int(layer->up_panels, layer->panels_up - panel);
    const Expert *expert = &moe->experts[layer->active[place]];
    const size_t panel_bytes = panel_bytes_of(kind->weights, layer->k_up);
    const char *w = up_weights(layer, task);
    const int next = task + layer->stride, tasks = layer->up_tasks_per_expert * layer->active_count;
    const bool goes_on = next < tasks, looks = looks_ahead(layer, place);
    const char *next_w = goes_on ? up_weights(layer, next) : down_weights(layer, thread, 0);
    const int next_panels = goes_on ? layer->up_panels : layer->down_panels;
    const size_t next_bytes = goes_on ? panel_bytes : panel_bytes_of(kind->weights, layer->k_down);
    Ahead ahead = {.weights = first_panels(next_w, next_panels, next_bytes)};
    if (!looks)
        expect(next_w, next_panels * next_bytes);
    else if (goes_on && next / layer->up_tasks_per_expert != place)
        ahead.rows = rows_of(layer, layer->x, layer->x_stride, next / layer->up_tasks_per_expert);
    const float *bias = (const float *)expert->up_bias;
    const int out_panel = moe->activation.has_gate ? panel / 2 : panel;
    float *c = sums_of(layer, thread);
    for (int row = layer->first_row[place]; row < layer->first_row[place + 1]; row += BLOCK_ROWS) {
        const int m = min_int(BLOCK_ROWS, layer->first_row[place + 1] - row);
        multiply(kind, layer->x + (size_t)row * layer->x_stride, layer->x_stride, m, w, panel_bytes, panels,
                 layer->k_up, c, looks && row == layer->first_row[place] ? &ahead : NULL);
        for (int r = 0; r < m; r++)
            activate(&moe->activation, c + (size_t)r * panels * PANEL, bias ? bias + panel * PANEL : NULL, panels,
                     layer->hidden + (size_t)(row + r) * layer->hidden_stride +
                         (size_t)out_panel * PANEL * format_bytes(kind->x),
                     kind->x);
    }
}

static void down(void *context, int task, int thread) {
    const Layer *layer = context;
    const Moe *moe = layer->moe;
    const GemmKind *kind = moe->kind;
    const int panel = task * layer->down_panels;
    const int panels = min_int(layer->down_panels, layer->panels_down - panel);
    const int first = panel * PANEL, width = min_int(panels * PANEL, moe->hidden - first);
    const size_t panel_bytes = panel_bytes_of(kind->weights, layer->k_down);
    float *c = sums_of(layer, thread);
    for (int token = layer->first_token; token < layer->first_token + layer->tokens; token++)
        memset(moe->out + (size_t)token * moe->hidden + first, 0, (size_t)width * sizeof(float));
    for (int place = 0; place < layer->active_count; place++) {
        const char *w = down_weights(layer, task, place);
        const float *bias = (const float *)moe->experts[layer->active[place]].down_bias;
        const bool goes_on = place + 1 < layer->active_count, looks = looks_ahead(layer, place);
        const int next = goes_on ? place + 1 : 0, next_task = goes_on ? task : task + layer->stride;
        Ahead ahead = {0};
        if (next_task < layer->down_tasks) {
            const char *next_w = down_weights(layer, next_task, next);
            ahead = (Ahead){first_panels(next_w, panels, panel_bytes),
                            rows_of(layer, layer->hidden, layer->hidden_stride, next)};
            if (!looks) expect(next_w, panels * panel_bytes);
        }
        for (int row = layer->first_row[place]; row < layer->first_row[place + 1]; row += BLOCK_ROWS) {
            const int m = min_int(BLOCK_ROWS, layer->first_row[place + 1] - row);
            multiply(kind, layer->hidden + (size_t)row * layer->hidden_stride, layer->hidden_stride, m, w, panel_bytes,
                     panels, layer->k_down, c, looks && row == layer->first_row[place] ? &ahead : NULL);
            for (int r = 0; r < m; r++) {
                const float score = layer->row_score[row + r], *sum = c + (size_t)r * panels * PANEL;
                float *out = moe->out + (size_t)layer->row_token[row + r] * moe->hidden + first;
                if (moe->x_format == BFLOAT16)
                    add_bfloat16(sum, bias ? bias + first : NULL, score, width, out);
                else if (bias)
                    for (int i = 0; i < width; i++) out[i] += score * (sum[i] + bias[first + i]);
                else
                    for (int i = 0; i < width; i++) out[i] += score * sum[i];
            }
        }
    }
}

/* Panels of a task: wide if there are many rows, but so that every thread gets several tasks, unless they would read
 * little at a time. A lone thread reads as much as it can in one piece. */
static int task_panels(const Layer *layer, int panels, int tasks_beside, int unit, size_t panel_bytes) {
    if (layer->is_alone) return WIDE_PANELS;
    const bool many = layer->rows > MANY_ROWS * layer->active_count;
    const int wanted = TASKS_PER_THREAD * pool_threads(layer->moe->pool);
    int width = many ? WIDE_PANELS : NARROW_PANELS;
    while (width > unit && width * panel_bytes >= 2 * LEAST_TASK_BYTES &&
           (panels + width - 1) / width * tasks_beside < wanted)
        width /= 2;
    return width;
}

/* Bytes of weights, counted once for each row. */
static size_t work_bytes(const Layer *layer) {
    const Format weights = layer->moe->kind->weights;
    const size_t expert_bytes = (size_t)layer->panels_up * panel_bytes_of(weights, layer->k_up) +
                                (size_t)layer->panels_down * panel_bytes_of(weights, layer->k_down);
    return (size_t)layer->rows * expert_bytes;
}

static void run_tasks(Layer *layer, Task *task, int tasks) {
    if (!layer->is_alone) {
        pool_run(layer->moe->pool, task, layer, tasks);
        return;
    }
    for (int i = 0; i < tasks; i++) task(layer, i, 0);
}

static void run_part(Layer *layer) {
    const Moe *moe = layer->moe;
    group(layer);
    const size_t bytes = work_bytes(layer);
    const uint64_t started = now_ns();
    layer->is_alone = pool_is_better_alone(moe->pool, bytes);
    layer->stride = layer->is_alone ? 1 : pool_threads(moe->pool);
    const Format weights = moe->kind->weights;
    const size_t up_bytes = panel_bytes_of(weights, layer->k_up), down_bytes = panel_bytes_of(weights, layer->k_down);
    layer->up_panels = task_panels(layer, layer->panels_up, layer->active_count, 2, up_bytes);
    layer->up_tasks_per_expert = (layer->panels_up + layer->up_panels - 1) / layer->up_panels;
    layer->down_panels = task_panels(layer, layer->panels_down, 1, 1, down_bytes);
    layer->down_tasks = (layer->panels_down + layer->down_panels - 1) / layer->down_panels;
    if (layer->rows > 0) expect(up_weights(layer, 0), layer->up_panels * up_bytes);
    const int gather_rows = gather_task_rows(moe->kind);
    run_tasks(layer, gather, (layer->rows + gather_rows - 1) / gather_rows);
    run_tasks(layer, up, layer->up_tasks_per_expert * layer->active_count);
    if (moe->kind->x == SPLIT)
        run_tasks(layer, split, (layer->rows + SPLIT_TASK_ROWS - 1) / SPLIT_TASK_ROWS);
    run_tasks(layer, down, layer->down_tasks);
    pool_learn(moe->pool, bytes, layer->is_alone, (double)(now_ns() - started));
}

int64_t moe_run(const Moe *moe) {
    const size_t pairs = (size_t)moe->tokens * moe->top_k;
    Layer layer = {.moe = moe};
    lay_out(&layer, moe->kind, pool_threads(moe->pool), moe->hidden, moe->intermediate, moe->tokens, moe->top_k,
            moe->num_experts, moe->scratch);
    for (size_t i = 0; i < pairs; i++) {
        /* Read once: a second read might return another id. */
        const int64_t id = moe->ids_are_wide ? ((const volatile int64_t *)moe->ids)[i]
                                             : ((const volatile int32_t *)moe->ids)[i];
        if (id != -1 && (id < 0 || id >= moe->num_experts || moe->experts[id].up == 0)) return id;
        layer.ids[i] = (int32_t)id;
    }
    layer.panels_down = (int)(round_up((size_t)moe->hidden, PANEL) / PANEL);
    layer.panels_up = (int)(round_up((size_t)moe->intermediate, PANEL) / PANEL) * (moe->activation.has_gate ? 2 : 1);
    layer.k_up = padded_k(moe->kind->weights, moe->hidden);
    layer.k_down = padded_k(moe->kind->weights, moe->intermediate);
    layer.x_stride = row_bytes(moe->kind, moe->hidden);
    layer.hidden_stride = row_bytes(moe->kind, moe->intermediate);
    const int step = tokens_at_once(moe->kind, moe->hidden, moe->intermediate, moe->tokens, moe->top_k);
    for (int token = 0; token < moe->tokens; token += step) {
        layer.first_token = token;
        layer.tokens = min_int(step, moe->tokens - token);
        run_part(&layer);
    }
    return -1;
}
