"""Makes golden.safetensors beside this file: a small GPT-2 in PyTorch, in float64, trained for some steps.

Needs torch and safetensors. Names and shapes are those of GPT-2 in the Hugging Face format. The same inputs, steps and
constants stand in the tests that read the file, through its metadata.
"""
import json
import math
import pathlib

import torch
from safetensors.torch import save_file
from torch.nn import functional as F

shape = {"layers": 2, "heads": 2, "channels": 8, "context": 6, "vocabulary": 13}
optimizer_config = {
    "beta1": 0.9,
    "beta2": 0.95,
    "epsilon": 1e-8,
    "weight-decay": 0.1,
    "clip-norm": 0.5,
    "learning-rate": 1e-2,
    "min-learning-rate": 1e-3,
    "warmup-steps": 2,
    "steps": 6,
}
sequences, tokens = 3, 5

torch.manual_seed(1)
torch.set_default_dtype(torch.float64)
L, H, C, V = shape["layers"], shape["heads"], shape["channels"], shape["vocabulary"]


def draw(*size, deviation=0.3, mean=0.0):
    return (mean + deviation * torch.randn(*size)).requires_grad_()


parameters = {}
for i in range(L):
    for name, inputs, outputs in [
        ("attn.c_attn", C, 3 * C),
        ("attn.c_proj", C, C),
        ("mlp.c_fc", C, 4 * C),
        ("mlp.c_proj", 4 * C, C),
    ]:
        parameters[f"h.{i}.{name}.weight"] = draw(inputs, outputs)
        parameters[f"h.{i}.{name}.bias"] = draw(outputs)
    for name in ["ln_1", "ln_2"]:
        parameters[f"h.{i}.{name}.weight"] = draw(C, mean=1.0)
        parameters[f"h.{i}.{name}.bias"] = draw(C)
parameters["ln_f.weight"] = draw(C, mean=1.0)
parameters["ln_f.bias"] = draw(C)
parameters["wpe.weight"] = draw(shape["context"], C)
parameters["wte.weight"] = draw(V, C)
x = torch.randint(V, (sequences, tokens))
y = torch.randint(V, (sequences, tokens))


def forward():
    p = parameters
    norm = lambda h, name: F.layer_norm(h, (C,), p[f"{name}.weight"], p[f"{name}.bias"])
    linear = lambda h, name: h @ p[f"{name}.weight"] + p[f"{name}.bias"]
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    h = p["wte.weight"][x] + p["wpe.weight"][:tokens]
    for i in range(L):
        qkv = linear(norm(h, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn")
        q, k, v = (part.unflatten(2, (H, C // H)).transpose(1, 2) for part in qkv.split(C, dim=2))
        scores = (q @ k.transpose(2, 3) / math.sqrt(C // H)).masked_fill(~mask, -math.inf)
        attention = (scores.softmax(3) @ v).transpose(1, 2).flatten(2)
        h = h + linear(attention, f"h.{i}.attn.c_proj")
        hidden = F.gelu(linear(norm(h, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc"), approximate="tanh")
        h = h + linear(hidden, f"h.{i}.mlp.c_proj")
    logits = norm(h, "ln_f") @ p["wte.weight"].T
    return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())


def learning_rate(step):
    c = optimizer_config
    if step < c["warmup-steps"]:
        return c["learning-rate"] * step / c["warmup-steps"]
    done = (step - c["warmup-steps"]) / (c["steps"] - c["warmup-steps"])
    share = 0.5 * (1 + math.cos(math.pi * done))
    return c["min-learning-rate"] + share * (c["learning-rate"] - c["min-learning-rate"])


decays = lambda name: parameters[name].dim() == 2 and name != "wpe.weight"
optimizer = torch.optim.AdamW(
    [
        {"params": [p for name, p in parameters.items() if decays(name)]},
        {"params": [p for name, p in parameters.items() if not decays(name)], "weight_decay": 0.0},
    ],
    betas=(optimizer_config["beta1"], optimizer_config["beta2"]),
    eps=optimizer_config["epsilon"],
    weight_decay=optimizer_config["weight-decay"],
)
out = {f"before.{name}": p.detach().clone() for name, p in parameters.items()}
losses, norms = [], []
for step in range(1, optimizer_config["steps"] + 1):
    optimizer.zero_grad()
    logits, loss = forward()
    loss.backward()
    if step == 1:
        out["logits"] = logits.detach().clone()
        out |= {f"gradient.{name}": p.grad.clone() for name, p in parameters.items()}
    losses.append(loss.item())
    norms.append(torch.nn.utils.clip_grad_norm_(parameters.values(), optimizer_config["clip-norm"]).item())
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step)
    optimizer.step()
out |= {f"after.{name}": p.detach().clone() for name, p in parameters.items()}
metadata = {
    "shape": shape,
    "optimizer": optimizer_config,
    "sequences": sequences,
    "tokens": x.flatten().tolist(),
    "targets": y.flatten().tolist(),
    "losses": losses,
    "norms": norms,
    "torch": torch.__version__,
}
path = pathlib.Path(__file__).with_name("golden.safetensors")
save_file(out, path, {"golden": json.dumps(metadata)})
print(path, path.stat().st_size, losses, norms)
