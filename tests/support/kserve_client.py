"""KServe's own client, in a process of its own as `tests.support.triton_client` is, and for the same reason.
``EMPTY CLUSTER SECURED CA CERT KEY``: addresses of a router without workers, of one with, of one with TLS and keys,
and files. Prints what came of it as JSON. See `tests.support.tools.kserve`."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Awaitable
from typing import Any

import grpc
import numpy as np
from kserve import InferenceGRPCClient, InferInput, InferRequest, InferResponse
from kserve.protocol.infer_type import RequestedOutput

from tests.support.processes import REPOSITORY

MODEL = "null"


def typed(name: str, values: list[Any], datatype: str = "BYTES") -> Any:
    """A tensor whose contents have a type in the message."""
    return InferInput(name, [len(values)], datatype, data=values)


def raw(name: str, values: list[Any], datatype: str = "BYTES") -> Any:
    """One whose contents are bytes."""
    made = InferInput(name, [len(values)], datatype)
    array = np.array(values, dtype={"BYTES": np.object_, "BOOL": np.bool_, "INT32": np.int32}[datatype])
    made.set_data_from_numpy(array, binary_data=True)
    return made


def asking(*inputs: Any, model: str = MODEL, name: str = "", outputs: tuple[str, ...] = (), **parameters: Any) -> Any:
    wanted = [RequestedOutput(output) for output in outputs]
    return InferRequest(
        model, list(inputs), request_id=name or None, parameters=parameters, request_outputs=wanted or None
    )


def told(response: InferResponse) -> dict[str, Any]:
    """A response as JSON has it: its tensors by name."""
    shown: dict[str, Any] = {"id": response.id, "model": [response.model_name, response.model_version]}
    for output in response.outputs:
        values = [value.decode() if isinstance(value, bytes) else value for value in output.as_numpy().tolist()]
        shown[output.name] = [output.datatype, list(output.shape), values]
    for name, value in (response.parameters or {}).items():
        shown[name] = getattr(value, value.WhichOneof("parameter_choice"))
    return shown


async def failed(call: Awaitable[Any]) -> list[str]:
    try:
        await call
    except grpc.RpcError as error:
        trailer = dict(error.trailing_metadata() or ())
        return [error.code().name, error.details(), str(trailer.get("x-request-id", ""))]
    raise AssertionError("it did not fail")


async def everything(address: str) -> dict[str, Any]:
    async with InferenceGRPCClient(address, retries=0) as client:
        hello = typed("text_input", ["hello"])
        lengths = ("text_output", "num_output_tokens", "finish_reason")
        return {
            "live": await client.is_server_live(headers=(("x-some", "header"),)),
            "ready": await client.is_server_ready(),
            "model_ready": [await client.is_model_ready(MODEL), await client.is_model_ready("other")],
            "typed": told(await client.infer(asking(hello, name="mine", max_tokens=5))),
            "raw": told(
                await client.infer(asking(raw("text_input", [b"hello", b"you"]), raw("max_tokens", [5, 3], "INT32")))
            ),
            "tensors": told(
                await client.infer(
                    asking(
                        typed("text_input", ["hello"]),
                        typed("max_tokens", [5], "INT32"),
                        typed("exclude_input_in_output", [True], "BOOL"),
                        outputs=lengths,
                        temperature="0.5",  # of numbers, its parameters know whole ones only
                        seed=7,
                    )
                )
            ),
            "bad": await failed(client.infer(asking(hello, name="theirs", temperature=9, top_p="much"))),
            "unknown": await failed(client.infer(asking(hello, model="gpt"))),
            "number": await failed(client.infer(asking(typed("text_input", [1], "INT32")))),
            "late": await failed(client.infer(asking(hello, max_tokens=4000), timeout=0.2)),
        }


async def unready(address: str) -> dict[str, Any]:
    """Its own retries of UNAVAILABLE are on, as they are by default."""
    async with InferenceGRPCClient(address, retries=2) as client:
        return {
            "live": await client.is_server_live(),
            "ready": await client.is_server_ready(),
            "model_ready": await client.is_model_ready(MODEL),
            "infer": await failed(client.infer(asking(typed("text_input", ["hello"])))),
        }


async def secured(address: str, ca_file: str, cert_file: str, key_file: str) -> dict[str, Any]:
    """With TLS, a certificate of its own, and a key for the API."""
    files = {"root_certificates": ca_file, "private_key": key_file, "certificate_chain": cert_file}
    request = asking(typed("text_input", ["hello"]), max_tokens=2)
    async with InferenceGRPCClient(address, use_ssl=True, retries=0, **files) as client:
        trusted = {
            "live": await client.is_server_live(),
            "without": await failed(client.infer(request)),
            "with": told(await client.infer(request, headers=(("authorization", "Bearer right"),))),
        }
    async with InferenceGRPCClient(address, use_ssl=True, root_certificates=ca_file, retries=0) as client:
        trusted["nobody"] = await failed(client.is_server_live(timeout=5.0))
    return trusted


async def documented(address: str) -> str:
    """What the example of docs/grpc.md gets."""
    blocks = [part.split("```")[0] for part in (REPOSITORY / "docs" / "grpc.md").read_text().split("```python\n")]
    (script,) = [block for block in blocks if "InferenceGRPCClient" in block]
    names: dict[str, Any] = {}
    exec(script.replace("127.0.0.1:50051", address).replace("smollm2-135m", MODEL), names)
    return str(await names["ask"]("Once upon a time"))


async def main(empty: str, cluster: str, tight: str, *files: str) -> dict[str, Any]:
    return {
        "unready": await unready(empty),
        "everything": await everything(cluster),
        "documented": await documented(cluster),
        "secured": await secured(tight, *files),
    }


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)  # it writes down every failure, with a traceback
    print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
