"""The policy component: prepare the policy's folder, report it, and end."""

from __future__ import annotations

import sys
from pathlib import Path

from toprope.errors import Corrupt, TopropeError
from toprope.records.messages import Failed, Finished, Ready, Warned
from toprope.records.run.manifest import Manifest
from toprope.settings.schema import PolicySection
from toprope.training.component.member import CrewMember
from toprope.training.policy.loading import EMBEDDED, describe_device, place
from toprope.training.policy.preflight import context_warning


def main() -> int:
    """Run the component; returns its exit status."""
    member = CrewMember.join()
    try:
        if member.spec.config.launcher.device == "cuda":
            describe_device(member.spec.config)  # fail before downloading a model that could not be used
        policy = _pinned(member)
        if member.spec.config.is_hosted:
            from toprope.training.hosted.policy import place_hosted

            folder = place_hosted(policy, member.folder.crew / "policy")
        else:
            folder = place(policy, Path(member.spec.policy_cache), member.report)
    except TopropeError as error:
        member.report(Failed(error.message, error.hint))
        return 1
    if warning := context_warning(folder, policy):
        member.report(Warned(warning))
    member.report(Ready(str(folder)))
    member.report(Finished())
    return 0


def _pinned(member: CrewMember) -> PolicySection:
    """The configured policy; in later attempts at the commit that the first one had."""
    policy = member.spec.config.policy
    if member.attempt == 1 or policy.model in EMBEDDED:
        return policy
    try:
        manifest = Manifest.read(member.folder)
    except Corrupt:
        manifest = None
    commit = manifest.policy.revision if manifest is not None else None
    return policy if commit is None else policy.model_copy(update={"revision": commit})


if __name__ == "__main__":
    sys.exit(main())
