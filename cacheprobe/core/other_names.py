"""Translates names of transformers, vLLM and TransformerLens into those of cacheprobe: keyword arguments and dtypes."""

from collections.abc import Container

_SAMPLED = "sampling=cp.SamplingParams({})"
_KEYWORDS = (
    ("max_tokens max_completion_tokens num_tokens", "max_new_tokens", "max_new_tokens="),
    ("max_length", "max_new_tokens", "max_new_tokens=, which counts no token of the prompt"),
    ("temperature top_k top_p min_p repetition_penalty stop n stop_token_ids", "sampling", _SAMPLED.format("{}=...")),
    ("max_new_tokens max_tokens", "sampling", _SAMPLED.format("max_new_tokens=...")),
    ("do_sample", "sampling", _SAMPLED.format("temperature=1.0") + "; without it the largest logit wins"),
    ("do_sample", "temperature", "temperature=1.0; at 0, the default, the largest logit wins"),
    ("num_return_sequences best_of", "sampling", _SAMPLED.format("n=...")),
    ("num_return_sequences best_of", "n", "n="),
    ("stop_strings stop_sequences", "sampling", _SAMPLED.format("stop=...")),
    ("stop_strings stop_sequences", "stop", "stop="),
    ("eos_token_id", "sampling", _SAMPLED.format("stop_token_ids=...")),
    ("eos_token_id", "stop_token_ids", "stop_token_ids="),
    ("assistant_model draft_model speculative_model", "drafter", "drafter=cp.drafters.DraftModel(model)"),
    ("prompt_lookup_num_tokens", "drafter", "drafter=cp.drafters.NGram()"),
    ("assistant_early_exit", "drafter", "drafter=cp.drafters.EarlyExit(layer)"),
    ("num_assistant_tokens num_speculative_tokens gamma", "draft_length", "draft_length="),
    ("output_hidden_states", "capture", 'capture="S"; then trace.states("S", layer, request_id) gives them'),
    ("output_attentions", "capture", 'capture=cp.CaptureConfig(heads=("pattern",))'),
    ("output_logits output_scores", "capture", 'capture="Z"; then trace.hypotheses() has the likeliest tokens'),
    ("names_filter", "capture", 'capture="STCZ", or a cp.CaptureConfig with sites, heads and layers'),
    ("hooks fwd_hooks", "interventions", "interventions=, with those that cp.interventions makes"),
    ("max_num_seqs batch_size", "max_batch", "max_batch="),
    ("max_model_len max_seq_len n_ctx", "capacity", "capacity="),
    ("torch_dtype", "dtype", "dtype="),
)
"""(Names in other libraries, our argument, what to write instead)."""

_DTYPES = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32",
    "fp64": "float64", "double": "float64",
}  # fmt: skip


def keyword_advice(name: str, known: Container[str]) -> str:
    """Returns the end of an error message for a keyword of another library, such as "; write max_new_tokens=". Returns
    "" for a name that no entry has, and if the function has none of the arguments that it stands for (`known`)."""
    for names, argument, text in _KEYWORDS:
        if name in names.split() and argument in known:
            return f"; write {text.format(name)}"
    return ""


def dtype_name(dtype: object) -> str:
    """Returns the name of a dtype as torch writes it: "bfloat16" for "bf16", "torch.bfloat16" and torch.bfloat16. Other
    names are returned unchanged."""
    name = str(dtype).removeprefix("torch.")
    return _DTYPES.get(name, name)
