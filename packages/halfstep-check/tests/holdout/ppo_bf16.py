import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Categorical


def layer_init(layer, std=np.sqrt(2), bias=0.0):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias)
    return layer


class Agent(nn.Module):
    def __init__(self, n_actions):
        super().__init__()
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(4, 32, 8, 4)), nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, 2)), nn.ReLU(),
            nn.Flatten(), layer_init(nn.Linear(64 * 81, 512)), nn.ReLU(),
        )
        self.actor = layer_init(nn.Linear(512, n_actions), 0.01)
        self.critic = layer_init(nn.Linear(512, 1), 1.0)

    def forward(self, obs):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            h = self.network(obs / 255.0)
        h = h.float()
        return Categorical(logits=self.actor(h)), self.critic(h).squeeze(-1)


def main(n_envs=8, horizon=128, updates=10_000, gamma=0.99, lam=0.95, clip=0.1):
    device = "cuda"
    torch.set_float32_matmul_precision("high")
    envs = gym.vector.SyncVectorEnv([lambda: gym.make("ALE/Breakout-v5") for _ in range(n_envs)])
    agent = Agent(envs.single_action_space.n).to(device)
    optim = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    obs = torch.as_tensor(envs.reset()[0], device=device)
    for update in range(updates):
        buf = {k: [] for k in ("obs", "act", "logp", "rew", "done", "val")}
        for _ in range(horizon):
            with torch.no_grad():
                dist, value = agent(obs)
                act = dist.sample()
            nxt, rew, term, trunc, _ = envs.step(act.cpu().numpy())
            for k, v in zip(buf, (obs, act, dist.log_prob(act), rew, term | trunc, value)):
                buf[k].append(torch.as_tensor(v, device=device))
            obs = torch.as_tensor(nxt, device=device)
        b = {k: torch.stack(v) for k, v in buf.items()}
        with torch.no_grad():
            last = agent(obs)[1]
            adv = torch.zeros_like(b["rew"], dtype=torch.float32)
            run = torch.zeros(n_envs, device=device)
            for t in reversed(range(horizon)):
                nonterm = 1.0 - b["done"][t].float()
                nextv = last if t == horizon - 1 else b["val"][t + 1]
                delta = b["rew"][t] + gamma * nextv * nonterm - b["val"][t]
                run = delta + gamma * lam * nonterm * run
                adv[t] = run
            ret = adv + b["val"]
        flat = {k: v.flatten(0, 1) for k, v in {**b, "adv": adv, "ret": ret}.items()}
        for _ in range(4):
            for idx in torch.randperm(n_envs * horizon, device=device).chunk(4):
                dist, value = agent(flat["obs"][idx])
                ratio = (dist.log_prob(flat["act"][idx]) - flat["logp"][idx]).exp()
                a = flat["adv"][idx]
                a = (a - a.mean()) / (a.std() + 1e-8)
                pg = torch.max(-a * ratio, -a * ratio.clamp(1 - clip, 1 + clip)).mean()
                vf = 0.5 * (value - flat["ret"][idx]).pow(2).mean()
                loss = pg + 0.5 * vf - 0.01 * dist.entropy().mean()
                optim.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optim.step()


if __name__ == "__main__":
    main()
