"""The code of environments that a run may execute.

Drivers compare it before each start of a worker, because files may change while a run waits or after it was lost.
"""

from __future__ import annotations

from toprope.errors import NotFound, NotPossibleNow
from toprope.records.run.digests import accepted_files, changed_files
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import AcceptedFile, Specification
from toprope.settings.owner import Home


class CodeChanged(NotPossibleNow):
    """The code of a run is other than what its start was confirmed with."""


def accepted_code(run: Specification, home: Home) -> list[AcceptedFile] | None:
    """Return the code that a run which starts now may execute; None for any.

    A member of a sweep executes what the sweep was started with, because nobody confirms the member.
    """
    if run.member is not None and not run.reproduces:
        try:
            return Specification.read(RunFolder(home.runs / run.member.sweep)).code
        except NotFound:
            pass
    return _present(run, home)


def code_to_resume(run: Specification, home: Home, *, by_owner: bool) -> list[AcceptedFile] | None:
    """Return the code that the next attempt of a run may execute; None for any.

    Args:
        by_owner: The owner resumes it, and so accepts the code as it is now.

    Raises:
        CodeChanged: The code has changed, and the owner wants starts confirmed.
    """
    if by_owner:
        return _present(run, home)
    if run.member is not None and not run.reproduces:
        return accepted_code(run, home)
    if run.code is None or home.limits().confirm == "never":
        return _present(run, home)
    require_unchanged(run)
    return run.code


def require_unchanged(run: Specification) -> None:
    """Raises CodeChanged if the code on disk is other than what a run was started or resumed with."""
    if run.code is not None and (changed := changed_files([run.environment, *run.mixture], run.code)):
        raise CodeChanged(
            f"The code of {run.run_id} changed after its start was confirmed: {', '.join(changed)}. Nothing was "
            "started.",
            hint=f"Put the former code back, or ask the owner, who accepts it with: toprope resume {run.run_id}",
        )


def _present(run: Specification, home: Home) -> list[AcceptedFile] | None:
    """Return the code on disk; None if no start is confirmed, because then nobody accepted any."""
    if home.limits().confirm == "never":
        return None
    return accepted_files([run.environment, *run.mixture])
