"""What a soak did, and what went wrong."""

from dataclasses import dataclass, field

__all__ = ["Figures"]


@dataclass(slots=True)
class Figures:
    """What was done and what went wrong."""

    logs: int = 0
    interrupts: int = 0
    interrupts_in_log: int = 0
    moments: int = 0
    faults: int = 0
    training_steps: int = 0
    models: int = 0
    problems: list[str] = field(default_factory=list)

    def expect(self, holds: bool, problem: str) -> None:
        if not holds and len(self.problems) < 100:
            self.problems.append(problem)

    def __str__(self) -> str:
        lines = [
            f"logs made                      {self.logs}",
            (
                f"interrupts delivered           {self.interrupts} ({self.interrupts_in_log} cut a "
                "log short)"
            ),
            f"moments interrupted one by one  {self.moments}",
            f"faults raised by models        {self.faults}",
            f"training steps alongside       {self.training_steps}",
            f"models in one process          {self.models}",
        ]
        if self.problems:
            lines += [
                f"{len(self.problems)} PROBLEMS:",
                *(f"  {problem}" for problem in self.problems),
            ]
        else:
            lines.append(
                "nothing lost: torch, models, generators, results and memory are as they should be"
            )
        return "\n".join(lines)
