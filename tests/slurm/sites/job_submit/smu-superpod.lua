-- "Running Jobs": a job must include the account of an allocation; the one for all is not usable any more.
function refused(job)
    if job.account == nil then return "an account must be given" end
end
