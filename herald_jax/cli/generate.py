"""``herald generate``: prompts in, text or JSON lines out."""

from __future__ import annotations

import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from herald_jax.cli.console import Refused, note, refusals
from herald_jax.cli.convert import hint_to_convert
from herald_jax.cli.delivery import Delivery
from herald_jax.cli.options import (
    MOST_TOKENS,
    BudgetFraction,
    BudgetTokens,
    CandidatesRatio,
    DeviceMemory,
    Dtype,
    ExactLayers,
    HostMemory,
    Json,
    KeyIndexName,
    KeyIndexOption,
    MaxBatch,
    Model,
    Transfer,
    TransferName,
    check_text,
    read_budget,
    read_size,
)
from herald_jax.cli.platform import prepare_platform
from herald_jax.cli.request_files import ResultFile, read_requests, read_text
from herald_jax.cli.rule_options import (
    AllowMask,
    CompareName,
    ConfidenceName,
    EditThreshold,
    EntropyBound,
    FallbackName,
    MaxPostSteps,
    NoClampQuota,
    RuleName,
    SmallBlock,
    Steps,
    StrategyName,
    Temperature,
    Threshold,
    TopK,
    TopP,
    read_rule,
)
from herald_jax.selection import BEYOND_DENSE, SELECTORS, check_method

METHODS = "; ".join(
    [
        f"auto: dense while the KV cache fits the device, {BEYOND_DENSE} beyond",
        "dense: the whole KV cache on the device",
        *(f"{name}: {selector.summary}" for name, selector in SELECTORS.items()),
    ]
)


def generate(
    model: Model = "embedded",
    method: Annotated[
        str, typer.Option(metavar="NAME", help=f"How to attend. {METHODS}.")
    ] = "auto",
    budget: BudgetFraction = None,
    budget_tokens: BudgetTokens = None,
    candidates_ratio: CandidatesRatio = None,
    key_index: KeyIndexOption = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="One prompt.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(metavar="F", help="A text file that is one prompt.")
    ] = None,
    requests: Annotated[
        Path | None,
        typer.Option(
            metavar="F.jsonl",
            help='A JSON object a line: {"id", "prompt" | "messages" | "prompt_ids", '
            '"max_new_tokens"?, "enable_thinking"?, "seed"?, "temperature"?, "top_k"?, "top_p"?, '
            '"threshold"?}.',
        ),
    ] = None,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            min=1, max=MOST_TOKENS, metavar="N", help="Tokens generated at most for a prompt."
        ),
    ] = 256,
    rule: RuleName = None,
    threshold: Threshold = None,
    steps: Steps = None,
    strategy: StrategyName = None,
    compare: CompareName = None,
    fallback: FallbackName = None,
    confidence: ConfidenceName = None,
    no_clamp_quota: NoClampQuota = False,
    small_block: SmallBlock = None,
    edit_threshold: EditThreshold = None,
    max_post_steps: MaxPostSteps = None,
    entropy_bound: EntropyBound = None,
    allow_mask: AllowMask = False,
    temperature: Temperature = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, metavar="S", help="Seed of sampling.")
    ] = 0,
    top_k: TopK = None,
    top_p: TopP = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Text that ends an answer; may be given repeatedly."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Wrap prompts in the model's chat template.")
    ] = False,
    stream: Annotated[
        bool,
        typer.Option(
            "--stream",
            help="Print text as its blocks are done; JSON lines of deltas with --requests.",
        ),
    ] = False,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            show_default="float32 on the CPU, elsewhere as stored", help="Dtype of weights and KV."
        ),
    ] = None,
    exact_layers: ExactLayers = None,
    transfer: Transfer = None,
    max_batch: MaxBatch = 8,
    max_context: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_TOKENS,
            metavar="N",
            show_default="what the requests need",
            help="Longest prompt and answer in tokens.",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1024,
            metavar="N",
            show_default="what affinity and quota allow",
            help="Host threads that select.",
        ),
    ] = None,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    as_json: Json = False,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="F.jsonl",
            help="Append results here instead of printing them; ids already there without an "
            "error are skipped, so the same command resumes.",
        ),
    ] = None,
) -> int:
    """Generate for one prompt or a file of requests.

    Results go to stdout, progress to stderr. With --json the last line of stdout is a summary.
    Examples:

    herald generate --prompt-file question.txt --stream

    herald generate --model sdar-8b --requests in.jsonl --output out.jsonl

    herald generate --method herald-draft --budget 0.1 --prompt-file doc.txt --json
    """
    check_text(model, "--model", "name a checkpoint or leave it out")
    for text in stop or ():
        check_text(text, "--stop")
    chosen_budget = read_budget(budget, budget_tokens)
    rule_options = read_rule(
        no_clamp_quota,
        allow_mask,
        rule=rule,
        threshold=threshold,
        steps=steps,
        strategy=strategy,
        compare=compare,
        fallback=fallback,
        confidence=confidence,
        small_block=small_block,
        edit_threshold=edit_threshold,
        max_post_steps=max_post_steps,
        entropy_bound=entropy_bound,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
    )
    work = _requests(prompt, prompt_file, requests)
    device_bytes = read_size(device_memory, "--device-memory")
    host_bytes = read_size(host_memory, "--host-memory")
    with refusals():
        check_method(method, candidates_ratio, key_index, transfer and transfer.value)
    with ExitStack() as stack:
        inputs = [path for path in (prompt_file, requests) if path is not None]
        results = None if output is None else stack.enter_context(ResultFile(output, inputs))
        asked = len(work)
        if results is not None:
            work = [fields for fields in work if fields["id"] not in results.done]
            if len(work) < asked:
                note(f"{asked - len(work)} of {asked} requests are in {output} already: skipped")
        prepare_platform(device_bytes)
        stack.enter_context(refusals())
        from herald_jax.engine.config import EngineConfig, GenerationConfig
        from herald_jax.engine.engine import Engine

        generation = GenerationConfig(
            max_new_tokens=max_new_tokens,
            seed=seed,
            stop=tuple(stop or ()),
            **rule_options,
        )
        config = EngineConfig(
            method=method,
            budget=chosen_budget,
            candidates_ratio=candidates_ratio,
            key_index=(key_index or KeyIndexName.int8).value,
            exact_layers=exact_layers,
            transfer=(transfer or TransferName.full).value,
            max_batch=min(max_batch, max(1, len(work))),
            max_context=max_context,
            threads=threads,
            device_memory=device_bytes,
            host_memory=host_bytes,
        )
        hint_to_convert(model, rule)
        engine = Engine.from_checkpoint(model, config, dtype=None if dtype is None else dtype.value)
        stack.callback(engine.close)
        run = Delivery(
            engine,
            single=requests is None,
            stream=stream,
            as_json=as_json,
            results=results,
            planned=len(work),
        )
        return run(work, generation, chat, {"model": model, "skipped": asked - len(work)})


def _requests(
    prompt: str | None, prompt_file: Path | None, requests: Path | None
) -> list[dict[str, Any]]:
    """The requests behind the three options, of which exactly one must be given."""
    given = [value is not None for value in (prompt, prompt_file, requests)]
    if sum(given) != 1:
        raise Refused("give exactly one of --prompt, --prompt-file and --requests")
    if requests is not None:
        return read_requests(requests)
    option = "--prompt" if prompt_file is None else f"--prompt-file {prompt_file}"
    # An editor ends a file with a newline that nobody means as a part of the prompt.
    text = (
        prompt
        if prompt_file is None
        else read_text(prompt_file, "--prompt-file").removesuffix("\n")
    )
    assert text is not None
    check_text(text, option)
    # The id follows from the text, so that --output never takes one prompt for another.
    return [{"id": f"prompt-{zlib.crc32(text.encode()):08x}", "prompt": text}]
