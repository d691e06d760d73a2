"""An open server of Tinker's interface, SkyRL on JAX, on the processor.

This file is also the server's program, which its own interpreter runs: it starts the engine without uv.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
import time
import typing
import urllib.request
from pathlib import Path

__all__ = ["PYTHON", "SkyrlServer"]

PYTHON = Path(os.environ.get("TOPROPE_TINKER_SERVER") or Path.home() / ".cache/toprope/skyrl-0.3.0") / "bin/python"
"""Interpreter of the server's virtual environment, which also has the client 0.24.1."""
_START_S = 180.0


class SkyrlServer:
    """The server, up. Close it after use.

    Args:
        folder: For its state and its log; created.
        model: Folder of the model; also its name.

    Raises:
        RuntimeError: It did not start; the text holds the end of its log.
    """

    def __init__(self, folder: Path, model: Path) -> None:
        folder.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        # The sizes keep the shapes, and with them the programs that JAX compiles, few.
        sizes = {"max_lora_adapters": 16, "train_micro_batch_size": 4, "sample_max_num_sequences": 32}
        config = {
            "base_model": str(model),
            "backend_config": sizes,
            "checkpoints_base": str(folder / "checkpoints"),
            "database_url": f"sqlite:///{folder / 'tinker.db'}",
        }
        variables = {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        variables["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        self._log = folder / "server.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [PYTHON, "-P", __file__, str(port), json.dumps(config)],
                env=os.environ | variables, cwd=folder, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.url, limit = f"http://127.0.0.1:{port}", time.monotonic() + _START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > limit:
                self.close()
                raise RuntimeError(f"the server did not start: {self._log.read_text()[-2000:]}")
            time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/get_server_capabilities", timeout=5):
                return True
        except OSError:
            return False

    def close(self) -> None:
        """End the server, which ends its engine."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()


def _serve() -> None:
    import typing_extensions

    # Pydantic takes no other on Python 3.11.
    typing.TypedDict = typing_extensions.TypedDict
    if sys.argv[1] == "engine":
        del sys.argv[1]
        runpy.run_module("skyrl.tinker.engine", run_name="__main__", alter_sys=True)
        return
    import uvicorn
    from skyrl.tinker import api  # type: ignore[import-not-found]
    from skyrl.tinker.config import EngineConfig, config_to_argv  # type: ignore[import-not-found]

    api._build_uv_run_cmd_engine = lambda _, config: [sys.executable, "-P", __file__, "engine", *config_to_argv(config)]
    api.app.state.engine_config = EngineConfig.model_validate_json(sys.argv[2])
    uvicorn.run(api.app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")


if __name__ == "__main__":
    _serve()
