"""How much of a step's time the device worked."""

from __future__ import annotations

import time

import torch


class Activity:
    """From its making on. CPU: processor time of this process over wall time and torch's threads. GPU: what its driver counts."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.wall, self.processor = time.perf_counter(), time.process_time()

    def told(self) -> dict[str, float]:
        """`device_activity`, 0 to 1, for the metrics file; nothing where it cannot be known.

        A GPU's (package nvidia-ml-py) is the share of the last sixth of a second to second in which a kernel of any process ran, and
        nothing on a part of a GPU (MIG), of which no driver says it.
        """
        if self.device.type == "cuda":
            try:
                return {"device_activity": torch.cuda.utilization(self.device) / 100}
            except Exception:  # no such package, or one of NVML's own errors: a number for display stops no training
                return {}
        if self.device.type != "cpu":
            return {}
        wall = max(time.perf_counter() - self.wall, 1e-9)
        return {"device_activity": min(1.0, (time.process_time() - self.processor) / wall / torch.get_num_threads())}
