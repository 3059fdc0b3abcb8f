/* `multiply`: a product of torch's bfloat16 tensors. */
#include "../../../exchange/tensors.h"
#include "product.h"

/* Read a tensor whose last dimension is contiguous. Returns false for any other object. */
static bool
read_rows(PyObject *object, Tensor *tensor)
{
    for (int dimensions = 1; dimensions <= MOST_DIMENSIONS; dimensions++) {
        if (read_tensor(object, dimensions, tensor)) {
            return tensor->values == BFLOAT16_VALUES && is_contiguous(tensor);
        }
    }
    return false;
}

/* Read the arguments. Returns whether they are a product that is computed here. */
static bool
read_product(PyObject *const *args, Product *product)
{
    Tensor x, w, out, bias = {0};
    if (!read_rows(args[0], &x) || !read_rows(args[3], &out) || !read_tensor(args[1], 2, &w) ||
        w.values != BFLOAT16_VALUES || (w.size[1] > 1 && w.stride[1] != 1)) {
        return false;
    }
    if (args[2] != Py_None && (!read_rows(args[2], &bias) || bias.dimensions != 1 || bias.size[0] != w.size[0])) {
        return false;
    }
    Py_ssize_t rows = 1, out_rows = 1;
    for (int d = 0; d < x.dimensions - 1; d++) {
        rows *= x.size[d];
    }
    for (int d = 0; d < out.dimensions - 1; d++) {
        out_rows *= out.size[d];
    }
    if (w.size[1] == 0 || x.size[x.dimensions - 1] != w.size[1] || out.size[out.dimensions - 1] != w.size[0] ||
        out_rows != rows) {
        return false;
    }
    *product = (Product){
        .x = (const uint16_t *)x.data,
        .w = (const uint16_t *)w.data,
        .bias = (const uint16_t *)bias.data,
        .out = (uint16_t *)out.data,
        .rows = rows,
        .channels = w.size[0],
        .inputs = w.size[1],
        .w_row = w.stride[0],
    };
    return true;
}

static PyObject *
dense_multiply(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != 5) {
        PyErr_SetString(PyExc_TypeError, "multiply takes 5 arguments: see _dense.pyi");
        return NULL;
    }
    Pool *pool = PyCapsule_GetPointer(args[4], POOL_CAPSULE);
    Product product;
    if (pool == NULL) {
        return NULL;
    }
    if (!read_product(args, &product)) {
        Py_RETURN_FALSE;
    }
    bool done;
    Py_BEGIN_ALLOW_THREADS
    done = multiply(&product, pool);
    Py_END_ALLOW_THREADS
    if (!done) {
        return PyErr_NoMemory();
    }
    Py_RETURN_TRUE;
}

static PyMethodDef methods[] = {
    {"multiply", (PyCFunction)(void (*)(void))dense_multiply, METH_FASTCALL, "see _dense.pyi"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_dense", "Products of bfloat16 tensors.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC
PyInit__dense(void)
{
    PyObject *made = PyModule_Create(&module);
    if (made != NULL &&
        (!load_tensors() ||
         PyModule_AddIntConstant(made, "multiplies", can_read_tensors() && can_multiply()) < 0 ||
         PyModule_AddIntConstant(made, "has_tiles", has_tiles()) < 0)) {
        Py_CLEAR(made);
    }
    return made;
}
