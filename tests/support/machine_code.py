"""What tests/kernels/test_hip_machine.py asks of the machine, in a process of its own. Prints JSON.

machine_code.py names RUNTIME                      the instructions that it knows
machine_code.py decode RUNTIME FILE                those in a file of machine code
machine_code.py launch RUNTIME BUNDLE KERNEL...    what each kernel stores, or what is said about it
"""

import ctypes
import json
import sys
from pathlib import Path

import torch

TEXT_BYTES = 1 << 20
BLOCK, LOADED, STORED = 128, 256, 128  # threads; words


def names(runtime: ctypes.CDLL) -> list[str]:
    text = ctypes.create_string_buffer(TEXT_BYTES)
    runtime.emulator_instructions(text, ctypes.c_size_t(TEXT_BYTES))
    return text.value.decode().splitlines()


def instructions(runtime: ctypes.CDLL, code: bytes) -> dict[int, str]:
    """Each instruction's text by the number of its first word."""
    text = ctypes.create_string_buffer(TEXT_BYTES)
    runtime.emulator_describe(code, ctypes.c_size_t(len(code) // 4), text, ctypes.c_size_t(TEXT_BYTES))
    numbered = (line.split(" ", 1) for line in text.value.decode().splitlines())
    return {int(number): instruction for number, instruction in numbered}


def decode(runtime: ctypes.CDLL, file: str) -> list[str]:
    return list(instructions(runtime, Path(file).read_bytes()).values())


def launch(runtime: ctypes.CDLL, file: str, *kernels: str) -> dict[str, object]:
    runtime.hipGetErrorString.restype = ctypes.c_char_p
    bundle, module = Path(file).read_bytes(), ctypes.c_void_p()
    assert runtime.hipModuleLoadData(ctypes.byref(module), bundle) == 0

    def verdict(name: str) -> object:
        function = ctypes.c_void_p()
        error = runtime.hipModuleGetFunction(ctypes.byref(function), module, name.encode())
        if error:
            return runtime.hipGetErrorString(error).decode()
        loaded = torch.arange(1000, 1000 + LOADED, dtype=torch.int32)
        stored = torch.zeros(STORED, dtype=torch.int32)
        params = (ctypes.c_uint64 * 2)(loaded.data_ptr(), stored.data_ptr())
        size = ctypes.c_size_t(ctypes.sizeof(params))
        # HIP_LAUNCH_PARAM_BUFFER_POINTER, _SIZE, _END
        extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(params), 2, ctypes.addressof(size), 3)
        error = runtime.hipModuleLaunchKernel(function, 1, 1, 1, BLOCK, 1, 1, 0, None, None, extra)
        return runtime.hipGetErrorString(error).decode() if error else stored.tolist()

    return {name: verdict(name) for name in kernels}


if __name__ == "__main__":
    question, path, *arguments = sys.argv[1:]
    answers = {"names": names, "decode": decode, "launch": launch}
    print(json.dumps(answers[question](ctypes.CDLL(path), *arguments)))
