/* The inner loops of dispatch and combine: what NumPy and torch would do in a dozen passes each, in one.
 *
 * A layer call of 64 tokens spends more time in the calls of those libraries than in the work itself. Nothing
 * here knows servers, slots or policies: arrays in, arrays out (`parts.py` and `policies.py` say what they
 * mean). Every function checks the lengths of what it is given and every index before it is used.
 *
 * Letters: P pairs (T tokens times K experts of each), C chunks, S servers, E experts, R rows of a part, H hidden.
 */
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define NO_CHUNK (-1)
#define NO_EXPERT (-1)
#define NOWHERE (-1)
/* A move is worth it where it saves this share of the chunk's own time: less would be noise of the rates. */
#define WORTH_MOVING 0.02

/* ---- arguments ------------------------------------------------------------------------------------------ */

typedef struct {
    Py_buffer view;
    bool open;
} Array;

/* Opens a contiguous buffer of `count` items of `size` bytes, or sets an exception. */
static bool
open_array(Array *array, PyObject *object, const char *name, Py_ssize_t count, Py_ssize_t size, bool writable)
{
    int flags = PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object, &array->view, flags) < 0) {
        return false;
    }
    array->open = true;
    if (count < 0 || array->view.itemsize != size || array->view.len < count * size) {
        PyErr_Format(PyExc_ValueError, "%s: %zd bytes in items of %zd, wanted %zd items of %zd", name,
                     array->view.len, array->view.itemsize, count, size);
        return false;
    }
    return true;
}

static void
close_arrays(Array *arrays, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (arrays[i].open) {
            PyBuffer_Release(&arrays[i].view);
        }
    }
}

#define COUNT_OF(arrays) (sizeof(arrays) / sizeof((arrays)[0]))

/* ---- group: pairs to chunks ------------------------------------------------------------------------------ */

typedef struct {
    int64_t pairs;
    int64_t chunks;
    int64_t first; /* chunk */
    int64_t seen;
} Expert;

/* Returns the number of chunks; -1 where an expert is out of range (`*wrong` says which), -2 without memory. */
static Py_ssize_t
group_pairs(const int64_t *ids, const uint8_t *wanted, Py_ssize_t pairs, int64_t num_experts, int64_t chunk_pairs,
            int32_t *chunk_of, int64_t *expert_of, int64_t *pairs_of, int64_t *wrong)
{
    Expert *experts = calloc((size_t)num_experts, sizeof(Expert));
    if (experts == NULL) {
        return -2;
    }
    for (Py_ssize_t p = 0; p < pairs; p++) {
        if (wanted != NULL && !wanted[p]) {
            continue;
        }
        if (ids[p] < 0 || ids[p] >= num_experts) {
            *wrong = ids[p];
            free(experts);
            return -1;
        }
        experts[ids[p]].pairs++;
    }
    int64_t chunks = 0;
    for (int64_t e = 0; e < num_experts; e++) {
        Expert *expert = &experts[e];
        expert->first = chunks;
        expert->chunks = (expert->pairs + chunk_pairs - 1) / chunk_pairs;
        for (int64_t i = 0; i < expert->chunks; i++, chunks++) {
            expert_of[chunks] = e;
            pairs_of[chunks] = 0;
        }
    }
    for (Py_ssize_t p = 0; p < pairs; p++) {
        if (wanted != NULL && !wanted[p]) {
            chunk_of[p] = NO_CHUNK;
            continue;
        }
        Expert *expert = &experts[ids[p]];
        /* Chunks of one expert are as even as they can be. */
        int64_t chunk = expert->first + expert->seen * expert->chunks / expert->pairs;
        expert->seen++;
        pairs_of[chunk]++;
        chunk_of[p] = (int32_t)chunk;
    }
    free(experts);
    return (Py_ssize_t)chunks;
}

static PyObject *
dispatch_group(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *ids, *wanted, *chunk_of, *expert_of, *pairs_of;
    Py_ssize_t pairs;
    long long num_experts, chunk_pairs;
    if (!PyArg_ParseTuple(args, "OOnLLOOO:group", &ids, &wanted, &pairs, &num_experts, &chunk_pairs, &chunk_of,
                          &expert_of, &pairs_of)) {
        return NULL;
    }
    if (num_experts < 1 || chunk_pairs < 1 || pairs < 0 || pairs > INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "experts and chunk_pairs must be positive, pairs in 0..2**31-1");
        return NULL;
    }
    Array arrays[5] = {0};
    PyObject *answer = NULL;
    /* No expert has more chunks than pairs, so there are never more chunks than pairs. */
    if (open_array(&arrays[0], ids, "ids", pairs, 8, false) &&
        (wanted == Py_None || open_array(&arrays[1], wanted, "wanted", pairs, 1, false)) &&
        open_array(&arrays[2], chunk_of, "chunk_of", pairs, 4, true) &&
        open_array(&arrays[3], expert_of, "expert_of", pairs, 8, true) &&
        open_array(&arrays[4], pairs_of, "pairs_of", pairs, 8, true)) {
        int64_t wrong = 0;
        Py_ssize_t chunks = group_pairs(arrays[0].view.buf, arrays[1].open ? arrays[1].view.buf : NULL, pairs,
                                        num_experts, chunk_pairs, arrays[2].view.buf, arrays[3].view.buf,
                                        arrays[4].view.buf, &wrong);
        if (chunks == -2) {
            PyErr_NoMemory();
        } else if (chunks == -1) {
            PyErr_Format(PyExc_IndexError, "expert %lld of %lld", (long long)wrong, num_experts);
        } else {
            answer = PyLong_FromSsize_t(chunks);
        }
    }
    close_arrays(arrays, COUNT_OF(arrays));
    return answer;
}

/* ---- by_share: a server for each chunk, in proportion to the shares --------------------------------------- */

static PyObject *
dispatch_by_share(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *expert_of, *shares, *server_out;
    Py_ssize_t chunks, servers, experts;
    double draw, step;
    if (!PyArg_ParseTuple(args, "OnOnnddO:by_share", &expert_of, &chunks, &shares, &servers, &experts, &draw, &step,
                          &server_out)) {
        return NULL;
    }
    if (servers < 0 || experts < 0 || (experts > 0 && servers > PY_SSIZE_T_MAX / 4 / experts) ||
        !(draw >= 0 && draw < 1) || !(step >= 0 && step < 1)) {
        PyErr_SetString(PyExc_ValueError, "servers, experts, draw or step out of range");
        return NULL;
    }
    Array arrays[3] = {0};
    PyObject *answer = NULL;
    if (!open_array(&arrays[0], expert_of, "expert_of", chunks, 8, false) ||
        !open_array(&arrays[1], shares, "shares", servers * experts, 4, false) ||
        !open_array(&arrays[2], server_out, "server_out", chunks, 8, true)) {
        goto done;
    }
    const int64_t *expert = arrays[0].view.buf;
    const float *share = arrays[1].view.buf;
    int64_t *server = arrays[2].view.buf;
    for (Py_ssize_t c = 0; c < chunks; c++) {
        if (expert[c] < 0 || expert[c] >= experts) {
            PyErr_Format(PyExc_IndexError, "chunk %zd: expert %lld of %zd", c, (long long)expert[c], experts);
            goto done;
        }
        double total = 0;
        for (Py_ssize_t s = 0; s < servers; s++) {
            total += (double)share[s * experts + expert[c]];
        }
        /* The first server whose cumulative share passes the draw; the last with a share, where rounding has
         * eaten the difference. */
        double sum = 0;
        server[c] = NOWHERE;
        for (Py_ssize_t s = 0; s < servers && sum <= draw * total; s++) {
            if (share[s * experts + expert[c]] > 0) {
                sum += (double)share[s * experts + expert[c]];
                server[c] = s;
            }
        }
        draw += step;
        draw -= draw >= 1 ? 1 : 0;
    }
    answer = Py_NewRef(Py_None);
done:
    close_arrays(arrays, COUNT_OF(arrays));
    return answer;
}

/* ---- level: move chunks off the server that would end last ----------------------------------------------- */

typedef struct {
    Py_ssize_t chunk;
    Py_ssize_t server;
    double ends; /* the later of the two servers' ends after the move */
} Move;

static Move
best_move(const int64_t *server_of, const int64_t *expert_of, const double *work, Py_ssize_t chunks,
          const float *shares, Py_ssize_t servers, Py_ssize_t experts, const double *rate, const double *ends,
          Py_ssize_t last)
{
    Move best = {-1, -1, ends[last]};
    for (Py_ssize_t c = 0; c < chunks; c++) {
        if (server_of[c] != last) {
            continue;
        }
        double left = ends[last] - rate[last] * work[c];
        for (Py_ssize_t s = 0; s < servers; s++) {
            if (s == last || !(shares[s * experts + expert_of[c]] > 0)) {
                continue;
            }
            double there = ends[s] + rate[s] * work[c];
            double later = there > left ? there : left;
            if (later < best.ends) {
                best = (Move){c, s, later};
            }
        }
    }
    return best;
}

static PyObject *
dispatch_level(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *server_of, *expert_of, *work, *shares, *rate, *ends;
    Py_ssize_t chunks, servers, experts;
    if (!PyArg_ParseTuple(args, "OOOnOnnOO:level", &server_of, &expert_of, &work, &chunks, &shares, &servers,
                          &experts, &rate, &ends)) {
        return NULL;
    }
    Array arrays[6] = {0};
    PyObject *answer = NULL;
    if (servers < 0 || experts < 0 || (experts > 0 && servers > PY_SSIZE_T_MAX / 4 / experts)) {
        PyErr_SetString(PyExc_ValueError, "servers and experts out of range");
        return NULL;
    }
    if (!open_array(&arrays[0], server_of, "server_of", chunks, 8, true) ||
        !open_array(&arrays[1], expert_of, "expert_of", chunks, 8, false) ||
        !open_array(&arrays[2], work, "work", chunks, 8, false) ||
        !open_array(&arrays[3], shares, "shares", servers * experts, 4, false) ||
        !open_array(&arrays[4], rate, "rate", servers, 8, false) ||
        !open_array(&arrays[5], ends, "ends", servers, 8, true)) {
        goto done;
    }
    int64_t *server = arrays[0].view.buf;
    const int64_t *expert = arrays[1].view.buf;
    const double *work_C = arrays[2].view.buf;
    const double *rate_S = arrays[4].view.buf;
    double *ends_S = arrays[5].view.buf;
    for (Py_ssize_t c = 0; c < chunks; c++) {
        if (server[c] < NOWHERE || server[c] >= servers || expert[c] < 0 || expert[c] >= experts) {
            PyErr_Format(PyExc_IndexError, "chunk %zd: server %lld of %zd, expert %lld of %zd", c,
                         (long long)server[c], servers, (long long)expert[c], experts);
            goto done;
        }
        if (server[c] != NOWHERE) {
            ends_S[server[c]] += rate_S[server[c]] * work_C[c];
        }
    }
    Py_ssize_t moves = 0;
    while (moves < chunks) {
        /* The last to end among those that have a chunk of this call: the others are not waited for. */
        Py_ssize_t last = NOWHERE;
        for (Py_ssize_t c = 0; c < chunks; c++) {
            if (server[c] != NOWHERE && (last == NOWHERE || ends_S[server[c]] > ends_S[last])) {
                last = (Py_ssize_t)server[c];
            }
        }
        if (last == NOWHERE) {
            break;
        }
        Move move = best_move(server, expert, work_C, chunks, arrays[3].view.buf, servers, experts, rate_S, ends_S,
                              last);
        if (move.chunk < 0) {
            break;
        }
        double own = rate_S[last] * work_C[move.chunk];
        if (!(ends_S[last] - move.ends > WORTH_MOVING * own)) {
            break;
        }
        ends_S[last] -= own;
        ends_S[move.server] += rate_S[move.server] * work_C[move.chunk];
        server[move.chunk] = move.server;
        moves++;
    }
    answer = PyLong_FromSsize_t(moves);
done:
    close_arrays(arrays, COUNT_OF(arrays));
    return answer;
}

/* ---- split: chunks to the rows of each server ------------------------------------------------------------ */

static PyObject *
dispatch_split(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *ids, *chunk_of, *server_of, *count_out, *rows_out, *ids_out;
    Py_ssize_t tokens, top_k, chunks, servers;
    if (!PyArg_ParseTuple(args, "OOnnOnOOOn:split", &ids, &chunk_of, &tokens, &top_k, &server_of, &chunks, &count_out,
                          &rows_out, &ids_out, &servers)) {
        return NULL;
    }
    if (tokens < 0 || top_k < 0 || servers < 0 || (top_k > 0 && tokens > INT32_MAX / top_k) ||
        (servers > 0 && tokens * top_k > PY_SSIZE_T_MAX / 8 / servers)) {
        PyErr_SetString(PyExc_ValueError, "tokens, top_k or servers out of range");
        return NULL;
    }
    Array arrays[6] = {0};
    PyObject *answer = NULL;
    Py_ssize_t pairs = tokens * top_k;
    if (!open_array(&arrays[0], ids, "ids", pairs, 8, false) ||
        !open_array(&arrays[1], chunk_of, "chunk_of", pairs, 4, false) ||
        !open_array(&arrays[2], server_of, "server_of", chunks, 8, false) ||
        !open_array(&arrays[3], count_out, "count_out", servers, 8, true) ||
        !open_array(&arrays[4], rows_out, "rows_out", servers * tokens, 8, true) ||
        !open_array(&arrays[5], ids_out, "ids_out", servers * pairs, 4, true)) {
        goto done;
    }
    const int64_t *id = arrays[0].view.buf;
    const int32_t *chunk = arrays[1].view.buf;
    const int64_t *server = arrays[2].view.buf;
    int64_t *count_S = arrays[3].view.buf;
    int64_t *rows_ST = arrays[4].view.buf;
    int32_t *ids_STK = arrays[5].view.buf;
    for (Py_ssize_t c = 0; c < chunks; c++) {
        if (server[c] < NOWHERE || server[c] >= servers) {
            PyErr_Format(PyExc_IndexError, "chunk %zd: server %lld of %zd", c, (long long)server[c], servers);
            goto done;
        }
    }
    memset(count_S, 0, (size_t)servers * sizeof(int64_t));
    for (Py_ssize_t t = 0; t < tokens; t++) {
        for (Py_ssize_t k = 0; k < top_k; k++) {
            int32_t c = chunk[t * top_k + k];
            if (c == NO_CHUNK) {
                continue;
            }
            if (c < 0 || c >= chunks) {
                PyErr_Format(PyExc_IndexError, "chunk %d of %zd", (int)c, chunks);
                goto done;
            }
            int64_t s = server[c];
            if (s == NOWHERE) {
                continue;
            }
            int64_t row = count_S[s] - 1;
            if (row < 0 || rows_ST[s * tokens + row] != t) {
                row = count_S[s]++;
                rows_ST[s * tokens + row] = t;
                for (Py_ssize_t j = 0; j < top_k; j++) {
                    ids_STK[(s * tokens + row) * top_k + j] = NO_EXPERT;
                }
            }
            ids_STK[(s * tokens + row) * top_k + k] = (int32_t)id[t * top_k + k];
        }
    }
    answer = Py_NewRef(Py_None);
done:
    close_arrays(arrays, COUNT_OF(arrays));
    return answer;
}

/* ---- combine: the sum of the parts ------------------------------------------------------------------------ */

/* 0.0f + x: as if the sum had begun with zeros, so that the sign of a zero does not depend on the parts. */
static void
first_row(float *restrict out, const float *restrict part, Py_ssize_t hidden)
{
    for (Py_ssize_t h = 0; h < hidden; h++) {
        out[h] = 0.0f + part[h];
    }
}

static void
add_row(float *restrict out, const float *restrict part, Py_ssize_t hidden)
{
    for (Py_ssize_t h = 0; h < hidden; h++) {
        out[h] += part[h];
    }
}

static PyObject *
dispatch_combine(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *out, *parts, *rows;
    Py_ssize_t tokens, hidden;
    if (!PyArg_ParseTuple(args, "OnnOO:combine", &out, &tokens, &hidden, &parts, &rows)) {
        return NULL;
    }
    Py_ssize_t count = PySequence_Size(parts);
    if (count < 0 || PySequence_Size(rows) != count || tokens < 0 || hidden < 0 ||
        (hidden > 0 && tokens > PY_SSIZE_T_MAX / 4 / hidden)) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_ValueError, "as many parts as rows, and sizes in range");
        }
        return NULL;
    }
    PyObject *answer = NULL;
    Array out_array = {0};
    Array *arrays = calloc(2 * (size_t)count + 1, sizeof(Array));
    uint8_t *covered = calloc((size_t)tokens + 1, 1);
    if (arrays == NULL || covered == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    if (!open_array(&out_array, out, "out", tokens * hidden, 4, true)) {
        goto done;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *row_object = PySequence_GetItem(rows, i);
        PyObject *part_object = row_object == NULL ? NULL : PySequence_GetItem(parts, i);
        Array *row_array = &arrays[2 * i], *part_array = &arrays[2 * i + 1];
        bool opened = part_object != NULL && open_array(row_array, row_object, "rows", 0, 8, false) &&
                      open_array(part_array, part_object, "part", row_array->view.len / 8 * hidden, 4, false);
        Py_XDECREF(row_object);
        Py_XDECREF(part_object);
        if (!opened) {
            goto done;
        }
        const int64_t *row = row_array->view.buf;
        for (Py_ssize_t r = 0; r < row_array->view.len / 8; r++) {
            if (row[r] < 0 || row[r] >= tokens) {
                PyErr_Format(PyExc_IndexError, "row %lld of %zd", (long long)row[r], tokens);
                goto done;
            }
        }
    }
    Py_BEGIN_ALLOW_THREADS
    float *sum = out_array.view.buf;
    for (Py_ssize_t i = 0; i < count; i++) {
        const int64_t *row = arrays[2 * i].view.buf;
        const float *part = arrays[2 * i + 1].view.buf;
        Py_ssize_t part_rows = arrays[2 * i].view.len / 8;
        for (Py_ssize_t r = 0; r < part_rows; r++) {
            float *to = sum + row[r] * hidden;
            if (covered[row[r]]) {
                add_row(to, part + r * hidden, hidden);
            } else {
                first_row(to, part + r * hidden, hidden);
                covered[row[r]] = 1;
            }
        }
    }
    for (Py_ssize_t t = 0; t < tokens; t++) {
        if (!covered[t]) {
            memset(sum + t * hidden, 0, (size_t)hidden * sizeof(float));
        }
    }
    /* Whoever looks next whether the parts were still his is to look after they were read. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    Py_END_ALLOW_THREADS
    answer = Py_NewRef(Py_None);
done:
    if (arrays != NULL) {
        close_arrays(arrays, 2 * (size_t)count);
    }
    close_arrays(&out_array, 1);
    free(arrays);
    free(covered);
    return answer;
}

/* ---- the module ------------------------------------------------------------------------------------------ */

static PyMethodDef methods[] = {
    {"group", dispatch_group, METH_VARARGS, NULL},
    {"by_share", dispatch_by_share, METH_VARARGS, NULL},
    {"level", dispatch_level, METH_VARARGS, NULL},
    {"split", dispatch_split, METH_VARARGS, NULL},
    {"combine", dispatch_combine, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_dispatch", .m_size = 0, .m_methods = methods, .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__dispatch(void)
{
    return PyModuleDef_Init(&module);
}
