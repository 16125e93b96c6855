-- "Using Slurm": a job is charged to the project that it names; nothing else is said to be refused.
function refused(job)
    if job.account == nil then return "an account must be given" end
end
