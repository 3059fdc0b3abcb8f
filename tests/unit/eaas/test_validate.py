"""What `eaas simulate validate` asks for."""

from __future__ import annotations

from eaas.bench.validate import DomainWorkload


def test_prompts_come_in_bursts_of_a_domain() -> None:
    workload = DomainWorkload(100, 1, prompt_tokens=40, output_tokens=4, burst=5)
    prompts = [workload.prompt(index) for index in range(45)]
    assert prompts == [workload.prompt(index) for index in range(45)]
    assert len({tuple(prompt) for prompt in prompts}) == 45  # no prefix is shared as a whole
    bursts = [set().union(*prompts[begin : begin + 5]) for begin in range(0, 45, 5)]
    assert all(len(tokens) == 6 for tokens in bursts)
    assert len({frozenset(tokens) for tokens in bursts}) == 8  # then the first comes again
    assert bursts[8] == bursts[0]
    assert all(16 <= token < 250 for prompt in prompts for token in prompt)
