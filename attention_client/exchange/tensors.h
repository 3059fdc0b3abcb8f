/* torch's tensors, read through DLPack's C exchange interface: one call instead of one for each attribute. */
#ifndef EAAS_TENSORS_H
#define EAAS_TENSORS_H

#include "../../eaas/minmax/arrays.h"

typedef enum { OTHER_VALUES, FLOAT32_VALUES, BFLOAT16_VALUES, INT32_VALUES, INT64_VALUES, BOOL_VALUES } Values;

#define MOST_DIMENSIONS 4

/* A tensor in the memory of the CPU. Strides count values. */
typedef struct {
    char *data;
    Values values;
    int dimensions;
    Py_ssize_t size[MOST_DIMENSIONS], stride[MOST_DIMENSIONS];
} Tensor;

/* Find torch's interface; without it (torch before 2.10) no tensor can be read. False: an exception is set. */
bool load_tensors(void);
bool can_read_tensors(void);
/* Read a tensor of so many dimensions. False: it is another object, on a device or of another shape. */
bool read_tensor(PyObject *object, int dimensions, Tensor *tensor);
bool is_contiguous(const Tensor *tensor);
/* torch.empty_like. */
PyObject *empty_like(PyObject *tensor);

#endif
