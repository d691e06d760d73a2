"""Tool that saves an environment which an agent wrote, if the owner allows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyio import to_thread

from toprope.errors import InvalidValue, NotPossibleNow
from toprope.records.walls import RESERVED
from toprope.text_format import call, clip, plural
from toprope.workbench.authored import declared, save
from toprope_tools.answers.answer import Answer
from toprope_tools.answers.planning import SavedEnvironment

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop


async def save_environment(workshop: Workshop, *, name: str, code: str) -> Answer:
    """Save a Python file with an environment into the owner's folder for files that agents write.

    Args:
        name: Name of the file, without its ending.
        code: Its text. It is parsed and never run here.

    Raises:
        NotPossibleNow: The owner does not let agents save, or the folder cannot be written.
        InvalidValue: Not a valid name or file, or it declares a reserved name or one that another environment has.
    """

    def work() -> Answer:
        module, found = declared(name, code)
        settings = workshop.settings()
        if settings.saves != "allow":
            place = workshop.home.configuration / "environments" / f"{module}.py"
            raise NotPossibleNow(
                "The owner does not let agents save environments.",
                hint=f"The file is valid. Show it to the person you work for, who saves it as {place}.",
            )
        folder = workshop.home.agent_environments
        path = folder / f"{module}.py"
        named = {one.name for one in found}
        if reserved := sorted(named & {*RESERVED, *settings.environment}):
            raise InvalidValue(
                f"The name {reserved[0]!r} is reserved by Toprope or by the owner's settings. Nothing was saved.",
                hint="Give the class another `name`.",
            )
        taken = [one for one in workshop.catalog.entries() if one.name in named and one.environment.file != str(path)]
        if taken:
            holder = taken[0].environment.file or taken[0].ecosystem
            raise InvalidValue(
                f"There is an environment {taken[0].name!r} already ({holder}). Nothing was saved.",
                hint="Give the class another `name`.",
            )
        workshop.home.ensure()
        saved = save(folder, module, code, found)
        lines = [f"Saved {saved.path}: {plural(len(found), 'environment')}, {', '.join(sorted(named))}."]
        if saved.earlier is not None:
            lines.append(f"The version before is kept as {saved.earlier}.")
        lines += [f"{one.name}: {clip(one.problem, 300)}" for one in found if one.problem]
        lines.append(f"Next: {call('check_environment', name=found[0].name)}")
        data = SavedEnvironment(path=str(saved.path), environments=[one.name for one in found])
        return Answer("\n".join(lines), data)

    return await to_thread.run_sync(work)
