"""Runs that `test_bits.py` repeats in processes of their own: prints records without times."""

from __future__ import annotations

import json
import sys

import torch

from gossamer.engine import RunSpec, run

if __name__ == "__main__":
    torch.set_num_threads(1)
    for options in json.loads(sys.argv[1]):
        for record in run(RunSpec.model_validate(options)):
            if record.kind != "started":
                print(record.model_dump_json(exclude={"train_s"}))
