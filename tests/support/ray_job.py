"""Submits a cluster as a Ray job, uses it, stops it. Run in a namespace of its own, where it starts a Ray head.

``python -m tests.support.ray_job REPORT MODEL``, in the folder that is uploaded. Writes what happened
to REPORT as JSON; the test judges.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import grpc
import psutil
from ray.job_submission import JobStatus, JobSubmissionClient

from protos import admin_pb2, admin_pb2_grpc

DASHBOARD = "http://127.0.0.1:8265"
ADDRESS = "127.0.0.1:50051"
JOB = "serve-under-test"
TOKENS = 1200


def main(report: Path, model: str) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # jobs run the `python` on PATH at `ray start`
    os.environ.update(PATH=path, RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
    resources = json.dumps({"prefill": 1, "decode": 1})
    run("ray", "start", "--head", "--port", "6379", "--node-ip-address", "127.0.0.1", "--dashboard-host", "127.0.0.1",
        "--dashboard-port", "8265", "--dashboard-agent-listen-port=0", "--num-cpus", "2",
        "--resources", resources)  # fmt: skip
    environment = json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}})
    run("ray", "job", "submit", "--address", DASHBOARD, "--no-wait", "--submission-id", JOB, "--working-dir", ".",
        "--runtime-env-json", environment, "--",
        "python", "-m", "cluster", "serve", "--prefill", "1", "--decode", "1", "--model", model, "--dtype", "float32",
        "--grpc-port", ADDRESS.rpartition(":")[2], "--http-port", "0",
        "--set", "prefill.num_blocks=256", "--set", "decode.num_blocks=256",
    )  # fmt: skip
    jobs = JobSubmissionClient(DASHBOARD)
    until(jobs, lambda: "READY" in jobs.get_job_logs(JOB), 150)
    folders = working_folders()
    whole = json.loads(generate("20").communicate(timeout=60)[0])
    running = generate(str(TOKENS))
    until(jobs, running_requests, 30)
    jobs.stop_job(JOB)
    until(jobs, lambda: jobs.get_job_status(JOB) in (JobStatus.STOPPED, JobStatus.FAILED, JobStatus.SUCCEEDED), 90)
    report.write_text(
        json.dumps(
            {
                "first": whole,
                "running_code": running.wait(60),
                "running": json.loads(running.communicate()[0] or "{}"),
                "status": jobs.get_job_status(JOB).value,
                "logs": jobs.get_job_logs(JOB),
                "folders": folders,
                "actors_left": actors_left(),
            }
        )
    )


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:3])} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def generate(tokens: str) -> subprocess.Popen[str]:
    flags = ["--address", ADDRESS, "--temperature", "0", "--ignore-eos", "--max-tokens", tokens, "--json"]
    command = [sys.executable, "-m", "cluster", "generate", "The tide", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def running_requests() -> int:
    with grpc.insecure_channel(ADDRESS) as channel:
        reply = admin_pb2_grpc.AdminStub(channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=30.0)
    return int(reply.running_requests)


def actor_processes() -> list[int]:
    """Worker actors of this namespace. Ray names a process after the actor in it."""
    processes = psutil.process_iter(["cmdline"])
    return [process.pid for process in processes if "Actor" in " ".join((process.info["cmdline"] or [])[:1])]


def actors_left(timeout_s: float = 30.0) -> list[int]:
    """Those that are still there after a moment: a process takes some time to go when it has said that it ends."""
    deadline = time.monotonic() + timeout_s
    while (left := actor_processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def working_folders() -> list[str]:
    """Where the actors run: Ray's copies of the uploaded folder."""
    return [psutil.Process(pid).cwd() for pid in actor_processes()]


def until(jobs: JobSubmissionClient, condition, timeout_s: float) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline or jobs.get_job_status(JOB) == JobStatus.FAILED:
            raise SystemExit(f"not in time, or the job has failed:\n{jobs.get_job_logs(JOB)}")
        time.sleep(0.2)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
