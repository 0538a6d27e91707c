"""Which files are ours, decided in one place: this toolkit replaces and removes what it wrote itself, and nothing else.

A folder that we write into holds a record, the file `.mamba-surgery`. It names every file that we wrote there, literally, with
the sha256 of its content, and every folder that we made. Each line carries a seal of its own. A file that the record does not
name is the user's. So is a file whose content is another than the recorded one, and every link. The user's files are never
replaced, removed, renamed or moved: they are named in an error, before the work begins and once more before anything is
exchanged. A record with a line that does not fit its seal grants nothing and is refused.

A line is written before the file that it names. So a process that is killed leaves no file of ours without its line, and a line
without a file does no harm. Files get their name when they are complete, and folders that are built as a whole are built
beside their place, so that a reader sees the old content or the new. A file that stands alone, where there is no record, is
replaced only if its writer knows its content as its own (records.record.Marked).

complaints.py says what was refused, in one line; steps.py has what the system does in one step, or not at all; folder.py is a
folder with its record, files.py writes, and removes, within the folders of running jobs, and replacing.py puts a folder that
was built as a whole at its place.
"""
