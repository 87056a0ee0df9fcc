"""A real `sgl.Engine` on a CPU: `python sglang_serve.py MODEL OUT.json ROUNDS [JSON of engine arguments]`.

Answers the same six prompts greedily in every round. Among the arguments may be "update": FOLDER, weights that are
loaded online before the last two rounds, and "one_by_one": one request at a time.
"""

import json
import os
import random
import sys
import time


def main() -> None:
    model, out, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
    given = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    update, one_by_one = given.pop("update", None), given.pop("one_by_one", False)
    import sglang as sgl

    started = time.monotonic()
    arguments = {
        "device": "cpu",
        "skip_tokenizer_init": True,
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "disable_radix_cache": True,
        "max_total_tokens": 4096,
        "max_running_requests": 8,
        "mem_fraction_static": 0.3,
        "dtype": "float32",
        "grammar_backend": "none",
        "log_level": "info",
        **given,
    }
    engine = sgl.Engine(model_path=model, **arguments)
    print(f"engine up after {time.monotonic() - started:.0f} s", flush=True)
    draw = random.Random(0)
    prompts = [[draw.randrange(3, 500) for _ in range(draw.randrange(4, 40))] for _ in range(6)]
    sampling = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    answers = []
    for number in range(rounds):
        if update is not None and number == rounds - 2:
            print("update:", engine.update_weights_from_disk(update), flush=True)
        batches = [[prompt] for prompt in prompts] if one_by_one else [prompts]
        found = [
            one for batch in batches for one in engine.generate(input_ids=batch, sampling_params=sampling)
        ]
        answers.append([one["output_ids"] for one in found])
        print(f"round {number}: as round 0: {answers[-1] == answers[0]}", flush=True)
    with open(out, "w") as file:
        json.dump(answers, file)
    engine.shutdown()
    print("engine down", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    main()
