"""One rank of the tests: it joins the others and runs the checks of a file, all or those of some names."""

import gc
import json
import sys
import traceback
from datetime import timedelta
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch
import torch.distributed as dist


def main(rank: int, size: int, folder: Path, checks: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    # Long, as a machine that is busy is not wrong; a test that hangs has its own time limit.
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    # A file of checks may use another beside it.
    sys.path.append(str(checks.parent))
    spec = spec_from_file_location(checks.stem, checks)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    ended = {}
    for name, check in module.checks():
        if names and name not in names:
            continue
        ended[name] = ""
        try:
            check()
        except Exception:  # noqa: BLE001 (whatever it is, the test prints it)
            ended[name] = traceback.format_exc()
            if "Connection closed" in ended[name] or "Timed out" in ended[name]:
                break
    (folder / f"ended-{rank}.json").write_text(json.dumps(ended))
    # Threads of gloo that outlive their group may abort the interpreter; models are parts of cycles.
    dist.destroy_process_group()
    gc.collect()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:])
