"""The policy component: prepare the policy's folder, report it, and end."""

from __future__ import annotations

import sys
from pathlib import Path

from toprope.errors import TopropeError
from toprope.records.messages import Failed, Finished, Ready, Warned
from toprope.records.run.manifest import pinned
from toprope.training.component.member import CrewMember
from toprope.training.policy.loading import describe_device, place
from toprope.training.policy.preflight import context_warning


def main() -> int:
    """Run the component; returns its exit status."""
    member = CrewMember.join()
    try:
        if member.spec.config.launcher.device == "cuda":
            describe_device(member.spec.config)  # fail before downloading a model that could not be used
        policy = pinned(member.spec.config.policy, member.folder)  # a resume: as the first attempt
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


if __name__ == "__main__":
    sys.exit(main())
