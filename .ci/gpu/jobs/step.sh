# The training step as it is, and with the first 1, 2, ... patches of files/step, in turns
if [ -n "${TRY:-}" ]; then export TRITON_INTERPRET=1; fi
trees=$(mktemp -d)
cp -r . "$trees/main"
csplit -szf patch_ .ci/gpu/files/step/step.patch '/^From [0-9a-f]\{40\} /' '{*}'
before=main
for patch in patch_*; do
  if ! grep "^+++" "$patch" | grep -qv " b/tests/"; then continue; fi
  cp -r "$trees/$before" "$trees/$patch"
  if ! patch -sp1 -d "$trees/$patch" < "$patch"; then rm -r "${trees:?}/$patch"; break; fi
  before=$patch
done
python .ci/gpu/files/step/drive.py "$trees"
