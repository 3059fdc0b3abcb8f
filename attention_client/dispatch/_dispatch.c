/* Python bindings of the inner loops of dispatch and combine.
 *
 * For a layer call of 64 tokens, NumPy and torch take longer for their calls than for the work. Arrays in, arrays
 * out: `parts.py` and `policies.py` explain them. Every function checks all lengths and indices; the loops are in
 * route.c and combine.c.
 *
 * Letters: P pairs (T tokens times K experts of each), C chunks, S servers, E experts, R rows of a part, H hidden.
 */
#include "../../eaas/minmax/arrays.h"
#include "combine.h"
#include "route.h"

#include <stdlib.h>
#include <string.h>

/* ---- group: pairs to chunks ------------------------------------------------------------------------------ */

static bool
experts_known(const int64_t *ids_P, const uint8_t *wanted_P, Py_ssize_t pairs, long long num_experts)
{
    Py_ssize_t wrong = find_wrong_expert(ids_P, wanted_P, pairs, num_experts);
    if (wrong >= 0) {
        PyErr_Format(PyExc_IndexError, "expert %lld of %lld", (long long)ids_P[wrong], num_experts);
    }
    return wrong < 0;
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
        open_array(&arrays[1], wanted, "wanted", pairs, 1, false) &&
        open_array(&arrays[2], chunk_of, "chunk_of", pairs, 4, true) &&
        open_array(&arrays[3], expert_of, "expert_of", pairs, 8, true) &&
        open_array(&arrays[4], pairs_of, "pairs_of", pairs, 8, true)) {
        const int64_t *ids_P = arrays[0].view.buf;
        const uint8_t *wanted_P = arrays[1].view.buf;
        Expert *experts = calloc((size_t)num_experts, sizeof(Expert));
        if (experts == NULL) {
            PyErr_NoMemory();
        } else if (experts_known(ids_P, wanted_P, pairs, num_experts)) {
            answer = PyLong_FromSsize_t(group_pairs(ids_P, wanted_P, pairs, num_experts, chunk_pairs, experts,
                                                    arrays[2].view.buf, arrays[3].view.buf, arrays[4].view.buf));
        }
        free(experts);
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
    for (Py_ssize_t c = 0; c < chunks; c++) {
        if (expert[c] < 0 || expert[c] >= experts) {
            PyErr_Format(PyExc_IndexError, "chunk %zd: expert %lld of %zd", c, (long long)expert[c], experts);
            goto done;
        }
    }
    choose_by_share(expert, chunks, arrays[1].view.buf, servers, experts, draw, step, arrays[2].view.buf);
    answer = Py_NewRef(Py_None);
done:
    close_arrays(arrays, COUNT_OF(arrays));
    return answer;
}

/* ---- level: move chunks off the server that would end last ----------------------------------------------- */

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
    const int64_t *server = arrays[0].view.buf;
    const int64_t *expert = arrays[1].view.buf;
    for (Py_ssize_t c = 0; c < chunks; c++) {
        if (server[c] < NOWHERE || server[c] >= servers || expert[c] < 0 || expert[c] >= experts) {
            PyErr_Format(PyExc_IndexError, "chunk %zd: server %lld of %zd, expert %lld of %zd", c,
                         (long long)server[c], servers, (long long)expert[c], experts);
            goto done;
        }
    }
    answer = PyLong_FromSsize_t(level_chunks(arrays[0].view.buf, expert, arrays[2].view.buf, chunks,
                                             arrays[3].view.buf, servers, experts, arrays[4].view.buf,
                                             arrays[5].view.buf));
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
        (top_k > 0 && tokens * top_k > PY_SSIZE_T_MAX / 8 / top_k)) {
        PyErr_SetString(PyExc_ValueError, "tokens, top_k or servers out of range");
        return NULL;
    }
    Array arrays[6] = {0};
    PyObject *answer = NULL;
    Py_ssize_t pairs = tokens * top_k, most_rows = tokens * (servers < top_k ? servers : top_k);
    int64_t *scratch = NULL;
    if (!open_array(&arrays[0], ids, "ids", pairs, 8, false) ||
        !open_array(&arrays[1], chunk_of, "chunk_of", pairs, 4, false) ||
        !open_array(&arrays[2], server_of, "server_of", chunks, 8, false) ||
        !open_array(&arrays[3], count_out, "count_out", servers, 8, true) ||
        !open_array(&arrays[4], rows_out, "rows_out", most_rows, 8, true) ||
        !open_array(&arrays[5], ids_out, "ids_out", most_rows * top_k, 4, true)) {
        goto done;
    }
    const int32_t *chunk = arrays[1].view.buf;
    const int64_t *server = arrays[2].view.buf;
    for (Py_ssize_t c = 0; c < chunks; c++) {
        if (server[c] < NOWHERE || server[c] >= servers) {
            PyErr_Format(PyExc_IndexError, "chunk %zd: server %lld of %zd", c, (long long)server[c], servers);
            goto done;
        }
    }
    for (Py_ssize_t p = 0; p < pairs; p++) {
        if (chunk[p] < NO_CHUNK || chunk[p] >= chunks) {
            PyErr_Format(PyExc_IndexError, "chunk %d of %zd", (int)chunk[p], chunks);
            goto done;
        }
    }
    scratch = malloc(2 * (size_t)servers * sizeof(int64_t) + 1);
    if (scratch == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    split_tokens(arrays[0].view.buf, chunk, tokens, top_k, server, servers, arrays[3].view.buf, scratch,
                 scratch + servers, arrays[4].view.buf, arrays[5].view.buf);
    answer = Py_NewRef(Py_None);
done:
    free(scratch);
    close_arrays(arrays, COUNT_OF(arrays));
    return answer;
}

/* ---- plan: the four above in one go ------------------------------------------------------------------------ */

typedef struct {
    Py_ssize_t tokens, top_k, servers, experts;
    long long chunk_pairs;
    double draw, step;
    const int64_t *ids_P;
    const uint8_t *wanted_P;
    const float *shares_SE;
    const double *rate_S;    /* NULL: no levelling */
    const double *backlog_S; /* NULL likewise */
    int64_t *rows_out;
    int32_t *ids_out;
} Routing;

/* All scratch memory in one block. The doubles come first, the 32-bit chunks last. */
typedef struct {
    double *ends_S, *work_S, *work_C;
    Expert *experts_E;
    int64_t *count_S, *next_S, *last_S, *expert_C, *pairs_C, *server_C;
    int32_t *chunk_P;
} Scratch;

static bool
make_scratch(Scratch *scratch, size_t servers, size_t experts, size_t chunks, size_t pairs)
{
    size_t words = 5 * servers + 4 * chunks + experts * (sizeof(Expert) / sizeof(int64_t)) + pairs / 2 + 1;
    double *block = malloc(words * sizeof(double));
    if (block == NULL) {
        PyErr_NoMemory();
        return false;
    }
    scratch->ends_S = block;
    scratch->work_S = scratch->ends_S + servers;
    scratch->work_C = scratch->work_S + servers;
    scratch->experts_E = (Expert *)(scratch->work_C + chunks);
    scratch->count_S = (int64_t *)(scratch->experts_E + experts);
    scratch->next_S = scratch->count_S + servers;
    scratch->last_S = scratch->next_S + servers;
    scratch->expert_C = scratch->last_S + servers;
    scratch->pairs_C = scratch->expert_C + chunks;
    scratch->server_C = scratch->pairs_C + chunks;
    scratch->chunk_P = (int32_t *)(scratch->server_C + chunks);
    memset(scratch->experts_E, 0, experts * sizeof(Expert));
    memset(scratch->work_S, 0, servers * sizeof(double));
    return true;
}

/* Returns the number of wanted pairs that have no server. */
static int64_t
route(const Routing *routing, Scratch *scratch)
{
    Py_ssize_t servers = routing->servers;
    Py_ssize_t chunks = group_pairs(routing->ids_P, routing->wanted_P, routing->tokens * routing->top_k,
                                    routing->experts, routing->chunk_pairs, scratch->experts_E, scratch->chunk_P,
                                    scratch->expert_C, scratch->pairs_C);
    for (Py_ssize_t c = 0; c < chunks; c++) {
        scratch->work_C[c] = 1.0 + (double)scratch->pairs_C[c] / (double)routing->chunk_pairs;
    }
    choose_by_share(scratch->expert_C, chunks, routing->shares_SE, servers, routing->experts, routing->draw,
                    routing->step, scratch->server_C);
    if (routing->rate_S != NULL) {
        memcpy(scratch->ends_S, routing->backlog_S, (size_t)servers * sizeof(double));
        level_chunks(scratch->server_C, scratch->expert_C, scratch->work_C, chunks, routing->shares_SE, servers,
                     routing->experts, routing->rate_S, scratch->ends_S);
    }
    split_tokens(routing->ids_P, scratch->chunk_P, routing->tokens, routing->top_k, scratch->server_C, servers,
                 scratch->count_S, scratch->next_S, scratch->last_S, routing->rows_out, routing->ids_out);
    int64_t left = 0;
    for (Py_ssize_t c = 0; c < chunks; c++) {
        if (scratch->server_C[c] == NOWHERE) {
            left += scratch->pairs_C[c];
        } else {
            scratch->work_S[scratch->server_C[c]] += scratch->work_C[c];
        }
    }
    return left;
}

/* (pairs left, [(server, rows, work), ...]) */
static PyObject *
shares_of_work(int64_t left, const Scratch *scratch, Py_ssize_t servers)
{
    PyObject *list = PyList_New(0);
    for (Py_ssize_t s = 0; list != NULL && s < servers; s++) {
        if (scratch->count_S[s] == 0) {
            continue;
        }
        PyObject *item = Py_BuildValue("nLd", s, (long long)scratch->count_S[s], scratch->work_S[s]);
        if (item == NULL || PyList_Append(list, item) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(item);
    }
    return list == NULL ? NULL : Py_BuildValue("LN", (long long)left, list);
}

static PyObject *
dispatch_plan(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *ids, *wanted, *shares, *rate, *backlog, *rows_out, *ids_out;
    Routing r = {0};
    if (!PyArg_ParseTuple(args, "OOnnOnnLddOOOO:plan", &ids, &wanted, &r.tokens, &r.top_k, &shares, &r.servers,
                          &r.experts, &r.chunk_pairs, &r.draw, &r.step, &rate, &backlog, &rows_out, &ids_out)) {
        return NULL;
    }
    if (r.tokens < 0 || r.top_k < 0 || r.servers < 0 || r.experts < 1 || r.chunk_pairs < 1 ||
        r.experts > INT32_MAX || r.chunk_pairs > INT32_MAX ||
        (r.top_k > 0 && r.tokens > INT32_MAX / r.top_k) || r.servers > PY_SSIZE_T_MAX / 64 / r.experts ||
        !(r.draw >= 0 && r.draw < 1) || !(r.step >= 0 && r.step < 1) || (rate == Py_None) != (backlog == Py_None)) {
        PyErr_SetString(PyExc_ValueError, "tokens, top_k, servers, experts, chunk_pairs, draw or step out of range");
        return NULL;
    }
    Py_ssize_t pairs = r.tokens * r.top_k, most_rows = r.tokens * (r.servers < r.top_k ? r.servers : r.top_k);
    Array arrays[7] = {0};
    PyObject *answer = NULL;
    if (open_array(&arrays[0], ids, "ids", pairs, 8, false) &&
        open_array(&arrays[1], wanted, "wanted", pairs, 1, false) &&
        open_array(&arrays[2], shares, "shares", r.servers * r.experts, 4, false) &&
        (rate == Py_None || (open_array(&arrays[3], rate, "rate", r.servers, 8, false) &&
                             open_array(&arrays[4], backlog, "backlog", r.servers, 8, false))) &&
        open_array(&arrays[5], rows_out, "rows_out", most_rows, 8, true) &&
        open_array(&arrays[6], ids_out, "ids_out", most_rows * r.top_k, 4, true)) {
        r.ids_P = arrays[0].view.buf;
        r.wanted_P = arrays[1].view.buf;
        r.shares_SE = arrays[2].view.buf;
        r.rate_S = arrays[3].open ? arrays[3].view.buf : NULL;
        r.backlog_S = arrays[4].open ? arrays[4].view.buf : NULL;
        r.rows_out = arrays[5].view.buf;
        r.ids_out = arrays[6].view.buf;
        /* One chunk per expert, plus one per `chunk_pairs` pairs; never more than pairs. */
        Py_ssize_t most_chunks = r.experts + (Py_ssize_t)(pairs / r.chunk_pairs);
        Scratch scratch;
        if (experts_known(r.ids_P, r.wanted_P, pairs, r.experts) &&
            make_scratch(&scratch, (size_t)r.servers, (size_t)r.experts,
                         (size_t)(most_chunks < pairs ? most_chunks : pairs), (size_t)pairs)) {
            int64_t left = route(&r, &scratch);
            answer = shares_of_work(left, &scratch, r.servers);
            free(scratch.ends_S);
        }
    }
    close_arrays(arrays, COUNT_OF(arrays));
    return answer;
}

/* ---- the module ------------------------------------------------------------------------------------------ */

static PyMethodDef methods[] = {
    {"group", dispatch_group, METH_VARARGS, NULL},
    {"by_share", dispatch_by_share, METH_VARARGS, NULL},
    {"level", dispatch_level, METH_VARARGS, NULL},
    {"split", dispatch_split, METH_VARARGS, NULL},
    {"plan", dispatch_plan, METH_VARARGS, NULL},
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
