"""A layer of experts in KTransformers' kt-kernel, in the environment that has it, without a package of ours.

Arguments: a directory and, as JSON, the layer. `experts.safetensors` has gate_up (E, 2I, H) and down
(E, H, I), with `.scales` if they are quantised; `batch.safetensors` has x, ids and scores.
"""

import json
import os
import sys
import time

import torch
from kt_kernel import kt_kernel_ext
from safetensors.torch import load_file, save_file


def main() -> None:
    """Load the experts, write a line, then one for each line that comes: the seconds that the batch took."""
    # The library prints to standard output.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    folder, layer = sys.argv[1], json.loads(sys.argv[2])
    experts, hidden, intermediate, top_k = layer["sizes"]
    workers = kt_kernel_ext.WorkerPoolConfig()
    workers.subpool_count, workers.subpool_numa_map = 1, [0]
    workers.subpool_thread_count = [layer["threads"]]
    cpu = kt_kernel_ext.CPUInfer(workers)
    on_gpu, order = torch.zeros(experts, dtype=torch.bool), torch.arange(experts)
    config = kt_kernel_ext.moe.MOEConfig(experts, top_k, hidden, intermediate, on_gpu.data_ptr())
    config.pool, config.max_len = cpu.backend_, layer["tokens"]
    config.quant_config.bits, config.quant_config.group_size = layer["bits"], layer["group"]
    config.quant_config.zero_point = False
    weights = load_file(f"{folder}/experts.safetensors")
    for end, field in (("", "projs"), (".scales", "scales")):
        # Without scales, addresses that are not read.
        both = weights.get(f"gate_up{end}", torch.zeros(experts, 2))
        parts = (*both.chunk(2, dim=1), weights.get(f"down{end}", both))
        for name, part in zip(("gate", "up", "down"), parts, strict=True):
            weights[name + end] = part = part.contiguous()
            if layer["quantises"]:
                setattr(config, f"{name}_proj", weights[name].data_ptr())
            else:
                setattr(config, f"{name}_{field}", [[one.data_ptr() for one in part]])
    moe = getattr(kt_kernel_ext.moe, layer["backend"])(config)
    cpu.submit(moe.load_weights_task(order.data_ptr()))
    cpu.sync()
    print("ready", file=answers)
    for _ in sys.stdin:
        batch = load_file(f"{folder}/batch.safetensors")
        out, count = (
            torch.empty_like(batch["x"]),
            torch.tensor([len(batch["x"])], dtype=torch.int32),
        )
        pointers = (each.data_ptr() for each in (batch["ids"], batch["scores"], batch["x"], out))
        task = moe.forward_task(count.data_ptr(), top_k, *pointers, False)
        started = time.perf_counter()
        cpu.submit(task)
        cpu.sync()
        took = time.perf_counter() - started
        save_file({"out": out}, f"{folder}/answer.safetensors")
        print(took, file=answers)


if __name__ == "__main__":
    main()
