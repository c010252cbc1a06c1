"""Triton's own client, in a process of its own: its messages have the names of those in protos/open_inference.proto,
and one process cannot have both. ``ADDRESS SCENARIO``; prints what came of it as JSON."""

from __future__ import annotations

import asyncio
import json
import queue
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

import router.client  # noqa: F401  # that both can be used in one process is part of the test

MODEL = "null"


def tensor(name: str, values: Any, datatype: str) -> Any:
    array = np.array(
        values, dtype={"BYTES": np.object_, "BOOL": bool, "INT32": np.int32, "FP32": np.float32}[datatype]
    )
    made = triton.InferInput(name, array.shape, datatype)
    made.set_data_from_numpy(array)
    return made


def text(*prompts: str) -> Any:
    return tensor("text_input", [prompt.encode() for prompt in prompts], "BYTES")


def told(result: Any, *names: str) -> dict[str, Any]:
    """Tensors of a result, its id and its parameters, as JSON has them."""
    response = result.get_response()
    shown: dict[str, Any] = {"id": response.id, "model": [response.model_name, response.model_version]}
    for name in names or ("text_output",):
        array = result.as_numpy(name)
        assert array is not None, name
        shown[name] = [value.decode() if isinstance(value, bytes) else int(value) for value in array.flatten()]
        shown["shape"] = list(array.shape)
    for name, value in response.parameters.items():
        shown[name] = getattr(value, value.WhichOneof("parameter_choice"))
    return shown


def failed(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except InferenceServerException as error:
        return [str(error.status()), error.message()]
    raise AssertionError("it did not fail")


def server(address: str) -> dict[str, Any]:
    with triton.InferenceServerClient(address) as client:
        return {
            "live": client.is_server_live(),
            "ready": client.is_server_ready(),
            "model_ready": [
                client.is_model_ready(MODEL),
                client.is_model_ready("other"),
                client.is_model_ready(MODEL, "7"),
            ],
            "server": client.get_server_metadata(as_json=True),
            "model": client.get_model_metadata(MODEL, as_json=True),
            "config": client.get_model_config(MODEL, as_json=True),
            "index": client.get_model_repository_index(as_json=True),
            "unknown": failed(lambda: client.get_model_metadata("other")),
            "statistics": failed(lambda: client.get_inference_statistics()),
        }


def infer(address: str) -> dict[str, Any]:
    with triton.InferenceServerClient(address) as client:
        plain = client.infer(MODEL, [text("hello")], parameters={"max_tokens": 5}, request_id="mine")
        as_vllm = client.infer(
            MODEL,
            [
                text("hello"),
                tensor("stream", [False], "BOOL"),
                tensor("exclude_input_in_output", [True], "BOOL"),
                tensor(
                    "sampling_parameters", [json.dumps({"max_tokens": 5, "temperature": 0, "top_k": -1})], "BYTES"
                ),
                tensor("return_finish_reason", [True], "BOOL"),
                tensor("return_num_input_tokens", [True], "BOOL"),
                tensor("return_num_output_tokens", [True], "BOOL"),
            ],
        )
        as_trt = client.infer(
            MODEL,
            [
                tensor("text_input", [[b"hello"], [b"you"]], "BYTES"),
                tensor("max_tokens", [[5], [3]], "INT32"),
                tensor("beam_width", [[1], [1]], "INT32"),
                tensor("stop_words", [["\u0001"], ["\u0002"]], "BYTES"),
                tensor("exclude_input_in_output", [[True], [True]], "BOOL"),
            ],
            outputs=[triton.InferRequestedOutput("text_output"), triton.InferRequestedOutput("num_output_tokens")],
        )
        samples = client.infer(
            MODEL, [text("a", "b")], parameters={"max_tokens": 2, "n": 2, "exclude_input_in_output": True}
        )
        details = ("text_output", "finish_reason", "num_input_tokens", "num_output_tokens")
        return {
            "plain": told(plain),
            "vllm": told(as_vllm, *details),
            "trt": told(as_trt, "num_output_tokens", "text_output"),
            "samples": told(samples),
            "bad": failed(lambda: client.infer(MODEL, [text("x")], parameters={"temperature": 9.0, "top_p": 3.0})),
            "unknown_parameter": failed(lambda: client.infer(MODEL, [text("x")], parameters={"beam_me": "up"})),
            "unknown_output": failed(
                lambda: client.infer(MODEL, [text("x")], outputs=[triton.InferRequestedOutput("logits")])
            ),
            "unknown_model": failed(lambda: client.infer("gpt", [text("x")])),
            "beams": failed(lambda: client.infer(MODEL, [text("x")], parameters={"beam_width": 4})),
            "streamed": failed(lambda: client.infer(MODEL, [text("x"), tensor("stream", [True], "BOOL")])),
            "late": failed(lambda: client.infer(MODEL, [text("x")], parameters={"max_tokens": 4000}, timeout=1)),
        }


def stream(address: str) -> dict[str, Any]:
    """Several requests on one stream, answered side by side, one of them refused."""
    came: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with triton.InferenceServerClient(address) as client:
        client.start_stream(callback=lambda result, error: came.put((result, error)))
        streamed = [tensor("stream", [True], "BOOL"), tensor("return_finish_reason", [True], "BOOL")]
        for name in ("one", "two"):
            client.async_stream_infer(
                MODEL,
                [text(name), *streamed],
                request_id=name,
                parameters={"max_tokens": 20},
                enable_empty_final_response=True,
            )
        client.async_stream_infer(MODEL, [text("whole")], request_id="whole", parameters={"max_tokens": 3})
        client.async_stream_infer(MODEL, [text("")], request_id="bad")
        # The same id twice is nothing to Triton.
        for _ in range(2):
            client.async_stream_infer(MODEL, [text("same"), *streamed], request_id="1", parameters={"max_tokens": 4})
        answers: dict[str, list[dict[str, Any]]] = {}
        errors, ended = [], 0
        while ended < 6:
            result, error = came.get(timeout=30)
            if error is not None:
                errors.append(error.message())
                ended += 1
                continue
            response = result.get_response()
            names = ("text_output",) if response.id == "whole" else ("finish_reason", "text_output")
            shown = told(result, *names)
            answers.setdefault(shown["id"], []).append(shown)
            ended += shown["triton_final_response"]
        client.stop_stream()
        # An error ends the stream, if it is asked to.
        client.start_stream(
            callback=lambda result, error: came.put((result, error)), headers={"triton_grpc_error": "true"}
        )
        client.async_stream_infer(MODEL, [text("")], request_id="bad")
        _, error = came.get(timeout=30)
        by_status = [str(error.status()), error.message()]
        client.stop_stream()
    return {"answers": answers, "errors": errors, "by_status": by_status}


def asynchronous(address: str) -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        async with triton_aio.InferenceServerClient(address) as client:
            one = told(await client.infer(MODEL, [text("hello")], parameters={"max_tokens": 5}))

            async def requests() -> AsyncIterator[dict[str, Any]]:
                for name in ("one", "two"):
                    inputs = [text(name), tensor("stream", [True], "BOOL")]
                    yield {
                        "model_name": MODEL,
                        "inputs": inputs,
                        "request_id": name,
                        "parameters": {"max_tokens": 20},
                    }

            texts: dict[str, str] = {}
            async for result, error in client.stream_infer(requests()):
                assert error is None, error
                shown = told(result)
                texts[shown["id"]] = texts.get(shown["id"], "") + shown["text_output"][0]
            return {"one": one, "texts": texts}

    return asyncio.run(run())


def cancelled(address: str) -> dict[str, Any]:
    """Leave a stream in the middle of two answers."""
    came: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(address) as client:
        client.start_stream(callback=lambda result, error: came.put(error or result))
        for name in ("left-1", "left-2"):
            inputs = [text(name), tensor("stream", [True], "BOOL")]
            client.async_stream_infer(MODEL, inputs, request_id=name, parameters={"max_tokens": 2000})
        seen: set[str] = set()
        while len(seen) < 2:
            seen.add(came.get(timeout=30).get_response().id)
        client.stop_stream(cancel_requests=True)
    return {"seen": sorted(seen)}


def keyed(address: str) -> dict[str, Any]:
    with triton.InferenceServerClient(address) as client:
        key = {"authorization": "Bearer right"}
        return {
            "live": client.is_server_live(),
            "without": failed(lambda: client.infer(MODEL, [text("x")])),
            "with": told(client.infer(MODEL, [text("x")], parameters={"max_tokens": 2}, headers=key)),
        }


SCENARIOS = {
    "server": server,
    "infer": infer,
    "stream": stream,
    "aio": asynchronous,
    "cancel": cancelled,
    "keys": keyed,
}

if __name__ == "__main__":
    assert not any(name.startswith("protos.open_inference") for name in sys.modules)
    print(json.dumps(SCENARIOS[sys.argv[2]](sys.argv[1])))
