/* Combine: the sum of the parts, read from the slots (sum.h). */
#include "../../eaas/minmax/arrays.h"
#include "sum.h"

#include <stdlib.h>
#include <string.h>

static void
sum_parts(float *out_TH, Py_ssize_t tokens, Py_ssize_t hidden, Addend *parts, Py_ssize_t count)
{
    for (Py_ssize_t t = 0; t < tokens; t++) {
        float *out = out_TH + t * hidden;
        if (!sum_token(out, t, hidden, parts, count)) {
            memset(out, 0, (size_t)hidden * sizeof(float));
        }
    }
}

/* Opens rows and result of part `i`, or sets an exception. Rows must ascend. */
static bool
open_part(PyObject *parts, PyObject *rows, Py_ssize_t i, Py_ssize_t tokens, Py_ssize_t hidden, Array *arrays,
          Addend *part)
{
    PyObject *row_object = PySequence_GetItem(rows, i);
    PyObject *part_object = row_object == NULL ? NULL : PySequence_GetItem(parts, i);
    bool opened = part_object != NULL && open_items(&arrays[0], row_object, "rows", 8, false) &&
                  open_array(&arrays[1], part_object, "part", arrays[0].view.len / 8 * hidden, 4, false);
    Py_XDECREF(row_object);
    Py_XDECREF(part_object);
    if (!opened) {
        return false;
    }
    *part = (Addend){arrays[0].view.buf, arrays[1].view.buf, arrays[0].view.len / 8, 0};
    int64_t before = -1;
    for (Py_ssize_t r = 0; r < part->rows; r++) {
        if (part->row_R[r] <= before || part->row_R[r] >= tokens) {
            PyErr_Format(PyExc_IndexError, "row %lld of %zd after row %lld", (long long)part->row_R[r], tokens,
                         (long long)before);
            return false;
        }
        before = part->row_R[r];
    }
    return true;
}

PyObject *
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
    Addend *opened = calloc((size_t)count + 1, sizeof(Addend));
    if (arrays == NULL || opened == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    if (!open_array(&out_array, out, "out", tokens * hidden, 4, true)) {
        goto done;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!open_part(parts, rows, i, tokens, hidden, &arrays[2 * i], &opened[i])) {
            goto done;
        }
    }
    Py_BEGIN_ALLOW_THREADS
    sum_parts(out_array.view.buf, tokens, hidden, opened, count);
    Py_END_ALLOW_THREADS
    answer = Py_NewRef(Py_None);
done:
    if (arrays != NULL) {
        close_arrays(arrays, 2 * (size_t)count);
    }
    close_arrays(&out_array, 1);
    free(arrays);
    free(opened);
    return answer;
}
