"""Plans of the passes of a frozen model, on the ranks of the one that is trained: a teacher, or a reference."""

from __future__ import annotations

from llmrecipes.plan.derive import Plan, derive
from llmrecipes.recipe.rules.distill_rules import teacher_recipe
from llmrecipes.recipe.rules.preference_rules import reference_recipe


def teacher_plan(plan: Plan) -> Plan:
    """The plan of the passes of a teacher, on the ranks of its student.

    The values that it would start with are others than the student's, for rehearsals without its weights.
    """
    teacher = teacher_recipe(plan.recipe)
    seed = teacher.train.model_copy(update={"seed": teacher.train.seed + 1})
    return derive(teacher.model_copy(update={"train": seed}), plan.layout.world_size, plan.cluster)


def reference_plan(plan: Plan) -> Plan:
    """The plan of the passes of a reference model (`dpo`), which starts from the same values, on the same ranks."""
    return derive(reference_recipe(plan.recipe), plan.layout.world_size, plan.cluster)
