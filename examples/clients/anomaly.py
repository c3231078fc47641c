"""Watches three sensors at once, each a sequence of its own, and reports values that do not fit."""

import queue

import numpy as np
from common import TIMEOUT_S, WrongAnswer, expect, options, run, tensor
from tritonclient.grpc import InferenceServerClient, InferResult
from tritonclient.utils import InferenceServerException

MODEL = "anomaly"
LIMIT = 5.0  # standard deviations
STEPS = 200
# What goes wrong, where and when, and by how much.
FAULTS = {"boiler": (120, 8.0), "fridge": (75, -6.0), "hall": (160, 5.0)}
LEVELS = {"boiler": 71.0, "fridge": 4.0, "hall": 20.5}


def series(level: float, fault: tuple[int, float], random: np.random.Generator) -> np.ndarray:
    """Temperatures that drift slowly and tremble a little, but for one that is off."""
    drift = np.sin(np.linspace(0, 2 * np.pi, STEPS))
    values = level + drift + random.normal(0, 0.5, STEPS)
    when, how_much = fault
    values[when] += how_much
    return values.astype(np.float32)


def watch(client: InferenceServerClient) -> None:
    random = np.random.default_rng(1)
    sensors = {name: series(LEVELS[name], fault, random) for name, fault in FAULTS.items()}
    answers: queue.SimpleQueue[tuple[InferResult | None, InferenceServerException | None]]
    answers = queue.SimpleQueue()
    client.start_stream(lambda result, error: answers.put((result, error)), stream_timeout=TIMEOUT_S)
    left = STEPS * len(sensors)
    found: dict[str, int] = {}
    try:
        for step in range(STEPS):
            for name, values in sensors.items():
                client.async_stream_infer(
                    MODEL,
                    [tensor("value", values[step].reshape(1, 1))],
                    request_id=f"{name} {step}",
                    sequence_id=name,
                    sequence_start=step == 0,
                    sequence_end=step == STEPS - 1,
                )
        print(f"{'step':>4}  {'sensor':8} {'value':>7} {'expected':>9} {'score':>7}")
        while left:
            try:
                result, error = answers.get(timeout=TIMEOUT_S)
            except queue.Empty:
                raise WrongAnswer(f"{left} requests got no answer in {TIMEOUT_S:g} s") from None
            if result is None:
                raise error or WrongAnswer("a message with neither a result nor an error")
            left -= 1
            name, _, number = result.get_response().id.partition(" ")
            step = int(number)
            score, expected = result.as_numpy("score").item(), result.as_numpy("expected").item()
            if abs(score) > LIMIT:
                value = sensors[name][step]
                print(f"{step:4}  {name:8} {value:7.2f} {expected:9.2f} {score:+7.1f}")
                expect(name not in found, f"{name} has one fault, and a second was found in step {step}")
                found[name] = step
    finally:
        # After a failure the rest of the answers is of no use: do not wait for them.
        client.stop_stream(cancel_requests=bool(left))
    wanted = {name: when for name, (when, _) in FAULTS.items()}
    expect(found == wanted, f"faults were found in {found}, and are in {wanted}")
    print(f"{STEPS} values of {len(sensors)} sensors, every fault found and no other")


if __name__ == "__main__":
    args = options(__doc__).parse_args()
    run(args.url, [MODEL], watch)
