"""transformers and peft, on language, speech and images."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from torch.optim import AdamW

import torchstrat as ts
from tests.programs.table import Parts, Step, images, noised, program, tokens, train

BERT: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": 0,
}
GPT2: dict[str, Any] = {
    "vocab_size": 40,
    "n_positions": 16,
    "n_embd": 8,
    "n_layer": 2,
    "n_head": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
LLAMA: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "head_dim": 4,
}


def _classifier(model: Any, **options: Any) -> tuple[Parts, Step]:
    """As the documents' fine-tuning of a text classifier."""
    optimizer = AdamW(model.parameters(), lr=1e-3, **options)

    def step(batch: Any) -> None:
        ids, labels = batch
        train(optimizer, model(input_ids=ids, attention_mask=(ids > 4).long(), labels=labels).loss)

    return {"model": model, "optimizer": optimizer}, step


IN_FLOAT32 = "transformers computes norms, rotations or the loss of language models in float32"


def _next_word(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The loss of the documents, in the dtype of the model: theirs is in float32."""
    scores = model(input_ids=ids).logits[:, -ids.shape[1] : -1]
    return F.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())


def _causal(model: Any, clip: float | None = None, *, own_loss: bool = True) -> tuple[Parts, Step]:
    """As the documents' training of a language model from nothing."""
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss = _next_word(model, batch[0]) if own_loss else model(input_ids=batch[0], labels=batch[0]).loss
        loss.backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()

    return {"model": model, "optimizer": optimizer}, step


@program("transformers", batches=tokens)
def bert_classifier() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    return _classifier(BertForSequenceClassification(BertConfig(**BERT, num_labels=3)).double())


@program("transformers", batches=tokens)
def bert_eager_attention() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(**BERT, num_labels=3, attn_implementation="eager")
    return _classifier(BertForSequenceClassification(config).double())


@program("transformers", batches=tokens)
def bert_masked_with_warm_up() -> Any:
    from transformers import BertConfig, BertForMaskedLM, get_linear_schedule_with_warmup

    model = BertForMaskedLM(BertConfig(**BERT)).double()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    scheduler = get_linear_schedule_with_warmup(optimizer, 1, 4)

    def step(batch: Any) -> None:
        masked = torch.where(torch.arange(7) % 3 == 0, 1, batch[0])
        train(optimizer, model(input_ids=masked, labels=batch[0]).loss)

    return {"model": model, "optimizer": optimizer}, step, scheduler.step


@program("transformers", batches=tokens)
def masked_labels_over_the_global_batch() -> Any:
    """Labels of -100 do not count, and replicas have different numbers of others."""
    from transformers import BertConfig, BertForMaskedLM

    model = BertForMaskedLM(BertConfig(**BERT)).double()
    optimizer = AdamW(model.parameters(), lr=1e-3)

    def step(batch: Any) -> None:
        ids, _ = batch
        labels = ids.masked_fill(ids % 3 > 0, -100)
        scores = model(input_ids=ids).logits
        total = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")
        train(optimizer, ts.global_mean(total, (labels != -100).sum()))

    return {"model": model, "optimizer": optimizer}, step


@program("transformers", batches=tokens)
def distilbert() -> Any:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    config = DistilBertConfig(
        vocab_size=40, dim=8, n_layers=2, n_heads=2, hidden_dim=16, max_position_embeddings=16, dropout=0.0,
        attention_dropout=0.0, seq_classif_dropout=0.0, num_labels=3,
    )  # fmt: skip
    return _classifier(DistilBertForSequenceClassification(config).double(), fused=True)


@program("transformers", batches=tokens)
def roberta_checkpointed() -> Any:
    from transformers import RobertaConfig, RobertaForSequenceClassification

    model = RobertaForSequenceClassification(RobertaConfig(**BERT, num_labels=3)).double()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return _classifier(model)


@program("transformers", batches=tokens)
def albert_shares_its_layers() -> Any:
    from transformers import AlbertConfig, AlbertForSequenceClassification

    config = AlbertConfig(**BERT, num_labels=3, embedding_size=8, classifier_dropout_prob=0.0)
    return _classifier(AlbertForSequenceClassification(config).double())


@program("transformers", batches=tokens)
def electra_layer_rates() -> Any:
    from transformers import ElectraConfig, ElectraForSequenceClassification

    model = ElectraForSequenceClassification(ElectraConfig(**BERT, num_labels=3, embedding_size=8)).double()
    slow, fast = list(model.electra.parameters()), list(model.classifier.parameters())
    optimizer = AdamW([{"params": slow, "lr": 1e-4}, {"params": fast, "lr": 1e-2}])

    def step(batch: Any) -> None:
        train(optimizer, model(input_ids=batch[0], labels=batch[1]).loss)

    return {"model": model, "optimizer": optimizer}, step


@program("transformers", batches=tokens)
def gpt2_clipped() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return _causal(GPT2LMHeadModel(GPT2Config(**GPT2)).double(), clip=0.5)


@program("transformers", batches=tokens)
def gpt2_accumulates() -> Any:
    """Two runs make an update."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(**GPT2)).double()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-3)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        for half in (slice(None, 4), slice(3, None)):
            (_next_word(model, batch[0][:, half]) / 2).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return {"model": model, "optimizer": optimizer}, step


@program("transformers", batches=tokens, by_ulp=IN_FLOAT32)
def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return _causal(LlamaForCausalLM(LlamaConfig(**LLAMA)).double(), clip=1.0, own_loss=False)


@program("transformers", batches=tokens, by_ulp=IN_FLOAT32)
def qwen() -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return _causal(Qwen2ForCausalLM(Qwen2Config(**LLAMA)).double())


@program("transformers", batches=tokens, by_ulp=IN_FLOAT32)
def mistral_with_a_window() -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    return _causal(MistralForCausalLM(MistralConfig(**LLAMA, sliding_window=4)).double())


@program("transformers", batches=tokens)
def gpt_neox() -> Any:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {key: BERT[key] for key in BERT if "dropout" not in key}
    return _causal(GPTNeoXForCausalLM(GPTNeoXConfig(**sizes)).double())


@program("transformers", batches=tokens)
def opt() -> Any:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=40, hidden_size=8, num_hidden_layers=2, ffn_dim=16, num_attention_heads=2, dropout=0.0,
        max_position_embeddings=16, word_embed_proj_dim=8, pad_token_id=0,
    )  # fmt: skip
    return _causal(OPTForCausalLM(config).double())


@program("transformers", batches=tokens, by_ulp=IN_FLOAT32)
def t5_with_adafactor() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=40, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).double()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)

    def step(batch: Any) -> None:
        train(optimizer, model(input_ids=batch[0], labels=batch[0].flip(1)).loss)

    return {"model": model, "optimizer": optimizer}, step


@program("transformers", batches=tokens)
def bart() -> Any:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=40, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, dropout=0.0, max_position_embeddings=16,
    )  # fmt: skip
    model = BartForConditionalGeneration(config).double()
    optimizer = AdamW(model.parameters(), lr=1e-3)

    def step(batch: Any) -> None:
        train(optimizer, model(input_ids=batch[0], labels=batch[0].flip(1)).loss)

    return {"model": model, "optimizer": optimizer}, step


@program("transformers", batches=partial(noised, 16, 4))
def whisper() -> Any:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=40, num_mel_bins=4, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, dropout=0.0, max_source_positions=8,
        max_target_positions=8, decoder_start_token_id=1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).double()
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def step(batch: Any) -> None:
        sound, _, labels = batch
        train(optimizer, model(input_features=sound[:, :, 0], labels=labels[:, None] % 40).loss)

    return {"model": model, "optimizer": optimizer}, step


def _seeing(model: Any, optimizer: Any) -> tuple[Parts, Step]:
    def step(batch: Any) -> None:
        train(optimizer, model(pixel_values=batch[0], labels=batch[1]).loss)

    return {"model": model, "optimizer": optimizer}, step


_VIT: dict[str, Any] = {
    **{key: value for key, value in BERT.items() if key not in ("vocab_size", "max_position_embeddings")},
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 5,
}


@program("transformers", batches=images)
def vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(**_VIT)).double()
    return _seeing(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))


@program("transformers", batches=images)
def deit() -> Any:
    from transformers import DeiTConfig, DeiTForImageClassification

    model = DeiTForImageClassification(DeiTConfig(**_VIT)).double()
    return _seeing(model, AdamW(model.parameters(), lr=1e-3))


@program("transformers", batches=tokens)
def distilled_from_a_teacher() -> Any:
    """The student learns from the scores of a frozen model."""
    from transformers import BertConfig, BertForSequenceClassification

    teacher = BertForSequenceClassification(BertConfig(**BERT, num_labels=3)).double().eval().requires_grad_(False)
    student = BertForSequenceClassification(BertConfig(**BERT | {"num_hidden_layers": 1}, num_labels=3)).double()
    optimizer = AdamW(student.parameters(), lr=1e-3)

    def step(batch: Any) -> None:
        with torch.no_grad():
            wanted = teacher(input_ids=batch[0]).logits
        out = student(input_ids=batch[0], labels=batch[1])
        soft = F.kl_div(out.logits.log_softmax(1), wanted.softmax(1), reduction="batchmean")
        train(optimizer, out.loss + soft)

    return {"student": student, "optimizer": optimizer}, step


@program("transformers", batches=tokens)
def contrastive_sentences() -> Any:
    """Each sentence and its reverse are a pair; all others of the global batch are not."""
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig(**BERT), add_pooling_layer=False).double()
    optimizer = AdamW(model.parameters(), lr=1e-3)

    def step(batch: Any) -> None:
        u, v = (
            F.normalize(model(input_ids=ids).last_hidden_state[:, 0], dim=1) for ids in (batch[0], batch[0].flip(1))
        )
        u, v = ts.get_replica_context().all_gather((u, v), axis=0)
        train(optimizer, F.cross_entropy(u @ v.T * 5, torch.arange(len(u))))

    return {"model": model, "optimizer": optimizer}, step


# -- adapters ----------------------------------------------------------------------------------------------------------


def _adapted(config: Any) -> tuple[Parts, Step]:
    from peft import get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    return _causal(get_peft_model(GPT2LMHeadModel(GPT2Config(**GPT2)).double(), config).double())


@program("transformers", "peft", batches=tokens)
def lora() -> Any:
    from peft import LoraConfig

    return _adapted(
        LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, target_modules=["c_attn"], fan_in_fan_out=True,
                   init_lora_weights=False, task_type="CAUSAL_LM")
    )  # fmt: skip


@program("transformers", "peft", batches=tokens)
def lora_with_magnitudes() -> Any:
    from peft import LoraConfig

    return _adapted(
        LoraConfig(r=2, use_dora=True, lora_dropout=0.0, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True,
                   init_lora_weights=False, task_type="CAUSAL_LM")
    )  # fmt: skip


@program("transformers", "peft", batches=tokens)
def scaled_activations() -> Any:
    from peft import IA3Config

    return _adapted(
        IA3Config(target_modules=["c_attn", "c_fc"], feedforward_modules=["c_fc"], fan_in_fan_out=True,
                  task_type="CAUSAL_LM")
    )  # fmt: skip


@program("transformers", "peft", batches=tokens)
def prompt_tuning() -> Any:
    from peft import PromptTuningConfig

    return _adapted(PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
