"""Times whole training steps of the same model in PyTorch: eager, scaled_dot_product_attention, fused AdamW.

step_pytorch.py LAYERS HEADS CHANNELS TOKENS VOCABULARY SEQUENCES THREADS SECONDS
"""
import json
import resource
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

layers, heads, channels, tokens, vocabulary, sequences, threads, seconds = map(int, sys.argv[1:])
torch.set_num_threads(threads)
torch.manual_seed(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(channels)
        self.c_attn = nn.Linear(channels, 3 * channels)
        self.attn_proj = nn.Linear(channels, channels)
        self.ln_2 = nn.LayerNorm(channels)
        self.c_fc = nn.Linear(channels, 4 * channels)
        self.mlp_proj = nn.Linear(4 * channels, channels)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (
            part.view(b, t, heads, c // heads).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).split(c, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, channels)
        self.wpe = nn.Embedding(tokens, channels)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.ln_f = nn.LayerNorm(channels)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x, y):
        h = self.wte(x) + self.wpe.weight
        for block in self.blocks:
            h = block(h)
        logits = F.linear(self.ln_f(h), self.wte.weight)
        return F.cross_entropy(logits.view(-1, vocabulary), y.view(-1))


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
count = sequences * tokens
data = torch.tensor([(i * i * 31 + i * 7) % vocabulary for i in range(count + 1)])
x, y = data[:-1].view(sequences, tokens), data[1:].view(sequences, tokens)


def train():
    loss = model(x, y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


train()
train()
start, durations = time.perf_counter(), []
while time.perf_counter() - start < seconds or len(durations) < 3:
    step_start = time.perf_counter()
    loss = train()
    durations.append(time.perf_counter() - step_start)
rate = count / sorted(durations)[len(durations) // 2]
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"tokens_per_second": rate, "peak_bytes": peak, "loss": loss}))
