#include "tensors.h"

#include <assert.h>

/* The parts of DLPack 1.x (dmlc/dlpack, include/dlpack/dlpack.h) that are used here. */
enum { DL_CPU = 1 };
enum { DL_INT = 0, DL_FLOAT = 2, DL_BFLOAT = 4, DL_BOOL = 6 };

typedef struct {
    uint32_t major, minor;
} DLVersion;

typedef struct {
    int32_t kind, index;
} DLDevice;

typedef struct {
    uint8_t code, bits;
    uint16_t lanes;
} DLDataType;

typedef struct {
    void *data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct {
    DLVersion version;
    void *older;
    int (*allocate)(void);
    int (*managed_of)(void);
    int (*object_of)(void);
    int (*tensor_of)(void *object, DLTensor *tensor);
    int (*stream)(void);
} DLExchange;

static const DLExchange *exchange;
static PyTypeObject *tensor_type;
static PyObject *torch_empty_like;

bool
load_tensors(void)
{
    PyObject *torch = PyImport_ImportModule("torch");
    if (torch == NULL) {
        return false;
    }
    tensor_type = (PyTypeObject *)PyObject_GetAttrString(torch, "Tensor");
    torch_empty_like = PyObject_GetAttrString(torch, "empty_like");
    Py_DECREF(torch);
    if (tensor_type == NULL || torch_empty_like == NULL) {
        return false;
    }
    PyObject *capsule = PyObject_GetAttrString((PyObject *)tensor_type, "__dlpack_c_exchange_api__");
    if (capsule == NULL) {
        PyErr_Clear();
        return true;
    }
    /* The interface lives as long as torch. */
    const DLExchange *found = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_DECREF(capsule);
    if (found == NULL) {
        return false;
    }
    if (found->version.major == 1 && found->tensor_of != NULL) {
        exchange = found;
    }
    return true;
}

bool
can_read_tensors(void)
{
    return exchange != NULL;
}

static Values
values_of(DLDataType type)
{
    if (type.lanes != 1) {
        return OTHER_VALUES;
    }
    switch (type.code << 8 | type.bits) {
    case DL_FLOAT << 8 | 32: return FLOAT32_VALUES;
    case DL_BFLOAT << 8 | 16: return BFLOAT16_VALUES;
    case DL_INT << 8 | 32: return INT32_VALUES;
    case DL_INT << 8 | 64: return INT64_VALUES;
    case DL_BOOL << 8 | 8: return BOOL_VALUES;
    default: return OTHER_VALUES;
    }
}

bool
read_tensor(PyObject *object, int dimensions, Tensor *tensor)
{
    DLTensor found;
    assert(dimensions <= MOST_DIMENSIONS);
    if (exchange == NULL || !PyObject_TypeCheck(object, tensor_type)) {
        return false;
    }
    if (exchange->tensor_of(object, &found) != 0) {
        /* A tensor without memory. */
        PyErr_Clear();
        return false;
    }
    if (found.device.kind != DL_CPU || found.ndim != dimensions) {
        return false;
    }
    *tensor = (Tensor){
        .data = (char *)found.data + found.byte_offset,
        .values = values_of(found.dtype),
        .dimensions = dimensions,
    };
    Py_ssize_t stride = 1;
    for (int d = dimensions - 1; d >= 0; d--) {
        tensor->size[d] = (Py_ssize_t)found.shape[d];
        tensor->stride[d] = found.strides == NULL ? stride : (Py_ssize_t)found.strides[d];
        stride *= tensor->size[d];
    }
    return true;
}

bool
is_contiguous(const Tensor *tensor)
{
    Py_ssize_t expected = 1;
    for (int d = tensor->dimensions - 1; d >= 0; d--) {
        if (tensor->size[d] > 1 && tensor->stride[d] != expected) {
            return false;
        }
        expected *= tensor->size[d];
    }
    return true;
}

PyObject *
empty_like(PyObject *tensor)
{
    return PyObject_CallFunctionObjArgs(torch_empty_like, tensor, NULL);
}
