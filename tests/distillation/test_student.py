from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from convergeflow.distillation.student import Student, Teacher, own_settings
from convergeflow.flow.grid import early_grid
from convergeflow.randomness import RowDraws
from convergeflow.sampling.settings import Settings
from convergeflow.systems.convergeflow import ConvergeFlowConfig, ConvergeFlowModel
from convergeflow.training.config import StageConfig
from convergeflow.zoo import load_model

LENGTH = 8


def teacher_of(settings: Settings, **changes: object) -> Teacher:
    torch.manual_seed(3)
    config = ConvergeFlowConfig.of_size("test", vocabulary=11, length=LENGTH, dropout=0.0, gate_init=0.5, **changes)
    model = ConvergeFlowModel(config)
    with torch.no_grad():  # a head that says something
        model.network.head.weight.normal_(std=0.5)
        model.network.condition_input.weight.normal_(std=0.1)
    return Teacher(model.requires_grad_(False), settings)


def student_of(teacher: Teacher, calls: tuple[int, ...], objective: str = "mse") -> Student:
    student = Student(teacher.model.config, teacher, calls)
    student.enter_stage(StageConfig(name="s", objective=objective, steps=1, lr=1e-3))  # type: ignore[arg-type]
    return student


def lesson(student: Student, rows: int = 6, seed: int = 0) -> dict[str, float]:
    tokens = torch.randint(11, (rows, LENGTH), generator=torch.Generator().manual_seed(1))
    loss = student.loss(tokens, times=torch.zeros(rows), draws=RowDraws(range(seed, seed + rows)))
    return {"loss": float(loss.total.detach()), **{name: float(value) for name, value in loss.parts.items()}}


def test_a_copy_of_a_plain_teacher_has_nothing_to_learn() -> None:
    """One call without a condition is what both make of pure noise: the distance is that of rounding."""
    teacher = teacher_of(Settings(nfe=1, self_condition="none"))
    assert lesson(student_of(teacher, (1,)))["mse"] < 1e-10
    # In four substeps the teacher comes to another prediction.
    assert lesson(student_of(Teacher(teacher.model, Settings(nfe=4, self_condition="none")), (1,)))["mse"] > 1e-6


def test_a_step_of_learning_moves_the_student_towards_the_teacher_and_not_the_teacher() -> None:
    teacher = teacher_of(Settings(nfe=8, temperature=0.3))
    before = {name: value.clone() for name, value in teacher.model.state_dict().items()}
    for objective in ("mse", "ce"):
        student = student_of(teacher, (2, 4), objective)
        optimizer = torch.optim.Adam([each for each in student.parameters() if each.requires_grad], lr=3e-3)
        tokens = torch.zeros(6, LENGTH, dtype=torch.long)
        losses = []
        for _ in range(15):
            loss = student.loss(tokens, times=torch.zeros(6), draws=RowDraws(range(6))).total
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < 0.8 * losses[0]
    assert all(torch.equal(before[name], value) for name, value in teacher.model.state_dict().items())


def test_a_lesson_depends_on_its_rows_alone_and_leaves_the_mode_alone() -> None:
    student = student_of(teacher_of(Settings(nfe=4)), (2,))
    student.train()
    assert lesson(student) == lesson(student) and student.training
    assert lesson(student) != lesson(student, seed=50)


def test_the_average_has_the_same_teacher_and_no_parameters_of_it() -> None:
    student = student_of(teacher_of(Settings(nfe=4)), (2,))
    assert copy.deepcopy(student).teacher is student.teacher
    assert len(list(student.parameters())) == len(list(student.teacher.model.parameters()))


def test_walks_end_with_all_numbers_of_calls_and_monitor_names_them() -> None:
    student = student_of(teacher_of(Settings(nfe=8)), (1, 2, 4))
    numbers = student.monitor(torch.zeros(24, LENGTH, dtype=torch.long), draws=RowDraws(range(24)))
    assert set(numbers) == {f"{name}@{calls}" for name in ("mse", "ce") for calls in (1, 2, 4)}


def test_it_walks_the_states_of_its_own_sampler() -> None:
    """A visit's state is that of `sample` with the student's preset, and its condition the prediction before."""
    student = student_of(teacher_of(Settings(nfe=4)), (4,))
    draws = RowDraws(range(3))
    visits = student._walk(torch.zeros(3, 0, dtype=torch.long), LENGTH, draws)
    noise = RowDraws(range(3)).normal(LENGTH, student.config.width, dtype=torch.float64)
    seen = []
    student.sample(3, LENGTH, seeds=range(3), settings=own_settings(4), noise=noise, observe=seen.append)
    times = early_grid(4).tolist()
    assert [visit.span.begin for visit in visits] == [step.t for step in seen] == times
    assert [visit.span.end for visit in visits] == [*times[1:], 1.0]
    assert all(torch.equal(visit.span.x, step.x_t) for visit, step in zip(visits, seen, strict=True))
    assert not visits[0].condition.any()
    assert all(torch.equal(after.condition, step.mu) for after, step in zip(visits[1:], seen, strict=False))


@pytest.mark.parametrize("seed", range(4))
def test_a_model_of_blocks_walks_behind_its_words(seed: int) -> None:
    teacher = teacher_of(Settings(nfe=1, self_condition="none"), block_length=4)
    student = student_of(teacher, (1,))
    # As above: a copy has nothing to learn, behind words too.
    assert lesson(student, seed=seed)["mse"] < 1e-10
    spans = {student._block(LENGTH, RowDraws([number])).start for number in range(20)}
    assert spans == {0, 4}


def test_it_is_saved_as_an_ordinary_model(tmp_path: Path) -> None:
    teacher = teacher_of(Settings(nfe=4), preset="swift")
    student_of(teacher, (2,)).save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert type(loaded) is ConvergeFlowModel and loaded.config.preset == "swift"
